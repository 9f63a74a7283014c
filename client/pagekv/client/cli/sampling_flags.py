"""Sampling flags that `generate` and `chat` share."""

from __future__ import annotations

import argparse

from pagekv.client.cli.parser import CommandParser
from pagekv.client.generation_types import CacheControls, GenerateOptions

# Flag, type, help. A flag that is not given is not sent. The server checks bounds, and its error names the field.
_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "sampling temperature; 0 is greedy, higher is more random [1]"),
    ("top-p", float, "sample from the likeliest tokens that have this probability together [1: off]"),
    ("top-k", int, "sample from this many likeliest tokens [0: off]"),
    ("min-p", float, "drop tokens below this share of the likeliest one's probability [0: off]"),
    ("seed", int, "seed; the same one gives the same text [random]"),
    ("min-tokens", int, "tokens to generate before anything may end the text [0]"),
    ("repetition-penalty", float, "above 1: tokens of prompt and output become less likely [1: off]"),
    ("presence-penalty", float, "above 0: tokens of the output become less likely [0: off]"),
    ("frequency-penalty", float, "above 0: the same, more with each occurrence [0: off]"),
    ("priority", int, "-100 to 100; lower runs earlier [0]"),
)
_BEAM_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("beam-width", int, "hypotheses to follow, 1 to 32; the --n best are printed at the end [0: off]"),
    ("length-penalty", float, "-10 to 10; above 0 favours longer results, below 0 shorter ones [1]"),
)


def add_sampling(parser: CommandParser, *, max_tokens: int | None) -> None:
    """Adds the sampling flags. `max_tokens` is the default of --max-tokens; None: the rest of the context."""
    group = parser.add_argument_group("sampling")
    shown = "what the context leaves" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens to generate [{shown}]"
    )
    for name, kind, help in _FLAGS:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence token")


def add_beams(parser: CommandParser) -> None:
    group = parser.add_argument_group("beam search", "instead of sampling; all results arrive at the end")
    for name, kind, help in _BEAM_FLAGS:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=help)
    group.add_argument("--early-stopping", action="store_true", help="stop once --beam-width hypotheses have ended")


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """The options given on the command line. Some commands lack the flags of beam search."""
    options: GenerateOptions = {}
    # A switch that is off, and an empty name, are not sent.
    for name in GenerateOptions.__annotations__:
        value = getattr(args, name, None)
        if value is not None and value is not False and value != "":
            options[name] = value  # type: ignore[literal-required]  # the flags are named as the options
    if args.namespace:
        options["cache"] = CacheControls(namespace=args.namespace)
    return options
