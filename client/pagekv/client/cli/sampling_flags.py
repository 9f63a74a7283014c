"""Sampling flags that `generate` and `chat` share, and the line that sums a generation up."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from pagekv.client.cli.parser import CommandParser
from pagekv.client.cli.terminal import milliseconds
from pagekv.client.client import PageKVClient
from pagekv.client.generation_types import CacheControls, Chunk, Completion, GenerateOptions, Prompt

# Flag, type, help. A flag that is not given is not sent; bounds are the server's to check, which names the field.
_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy, higher is more random [1]"),
    ("top-p", float, "sample from the likeliest tokens with this much probability [1: off]"),
    ("top-k", int, "sample from this many likeliest tokens [0: off]"),
    ("min-p", float, "drop tokens below this share of the likeliest one's probability [0: off]"),
    ("seed", int, "the same seed gives the same text [random]"),
    ("min-tokens", int, "tokens before anything may end the text [0]"),
    ("repetition-penalty", float, "above 1: repeat less [1: off]"),
    ("presence-penalty", float, "above 0: fewer tokens again [0: off]"),
    ("frequency-penalty", float, "above 0: fewer tokens many times [0: off]"),
    ("priority", int, "lower runs earlier, -100 to 100 [0]"),
)
_BEAM_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("beam-width", int, "hypotheses at once, 1 to 32; prints the --n best at the end [0: off]"),
    ("length-penalty", float, "above 0 longer results gain, below 0 shorter ones, -10 to 10 [1]"),
)


def add_sampling(parser: CommandParser, *, max_tokens: int | None) -> None:
    """The flags; `max_tokens` is the default of --max-tokens, None for what the context leaves."""
    group = parser.add_argument_group("sampling")
    shown = "what the context leaves" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"tokens at most [{shown}]")
    for name, kind, help in _FLAGS:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=help)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end of text")


def add_beams(parser: CommandParser) -> None:
    """The flags of beam search."""
    group = parser.add_argument_group("beam search", "instead of sampling; its results come when all are known")
    for name, kind, help in _BEAM_FLAGS:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=help)
    group.add_argument("--early-stopping", action="store_true", help="stop once --beam-width hypotheses have ended")


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """The options given on the command line; not every command has the flags of beam search."""
    options: GenerateOptions = {}
    # A switch that is off, and a name that is empty, say nothing.
    for name in GenerateOptions.__annotations__:
        value = getattr(args, name, None)
        if value is not None and value is not False and value != "":
            options[name] = value  # type: ignore[literal-required]  # the flags are named as the options
    if args.namespace:
        options["cache"] = CacheControls(namespace=args.namespace)
    return options


class Stopwatch:
    """Times one stream: started when made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._first_tokens = 0
        self._last = self._start

    def see(self, chunk: Chunk) -> None:
        """A chunk has arrived; one without tokens, such as the end alone, counts for nothing."""
        if not chunk.token_ids:
            return
        self._last = time.perf_counter()
        if self._first is None:
            self._first, self._first_tokens = self._last, chunk.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None if none came."""
        return None if self._first is None else self._first - self._start

    def tokens_per_s(self, completion_tokens: int) -> float | None:
        """Rate of the tokens after the first chunk; None if there were none."""
        if self._first is None or self._last <= self._first or completion_tokens <= self._first_tokens:
            return None
        return (completion_tokens - self._first_tokens) / (self._last - self._first)


def stream_to(
    write: Callable[[str], None], client: PageKVClient, prompt: Prompt, options: GenerateOptions
) -> tuple[Completion, Stopwatch]:
    """Generates one continuation; `write` gets the text as it arrives."""
    watch = Stopwatch()
    with client.stream(prompt, **options) as stream:
        for chunk in stream:
            watch.see(chunk)
            write(chunk.text)
    return stream.completion, watch


def summary(completion: Completion, watch: Stopwatch) -> str:
    """One line: tokens, cached tokens, time to first token, rate, preemptions and resumptions."""
    rate = watch.tokens_per_s(completion.completion_tokens)
    parts = [
        f"{completion.prompt_tokens} prompt tokens ({completion.cached_tokens} cached)",
        f"{completion.completion_tokens} generated",
        f"TTFT {milliseconds(watch.ttft_s)}",
    ]
    if rate is not None:
        parts.append(f"{rate:.0f} tok/s")
    if completion.preemptions:
        parts.append(f"preempted {times(completion.preemptions)}")
    if completion.resumes:
        parts.append(f"resumed {times(completion.resumes)}")
    return f"[{' · '.join(parts)} · {completion.finish_reason}]"


def times(number: int) -> str:
    """How often, in words: once, or 3 times."""
    return "once" if number == 1 else f"{number} times"
