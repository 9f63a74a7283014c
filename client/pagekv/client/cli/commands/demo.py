"""`pagekv demo`: starts the stack, shows text and the prefix cache at work, and stops it."""

from __future__ import annotations

import argparse
import signal
import time

from pagekv.client.cli.commands.generate import stream_text
from pagekv.client.cli.commands.up import (
    add_stack_flags,
    oracle_without_tokenizer,
    stack_config,
    wait_ready,
    without_tokenizer,
)
from pagekv.client.cli.parser import Subparsers, UsageError, add_command, add_flags
from pagekv.client.cli.stack_announcement import describe
from pagekv.client.cli.streamed_answer import stream_to
from pagekv.client.cli.terminal import Terminal, milliseconds, pagekv_command
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError
from pagekv.client.generation_types import Completion, GenerateOptions
from pagekv.client.launcher.own_manager import client_of
from pagekv.client.launcher.stack import LOOPBACK, Stack
from pagekv.client.launcher.stop_signals import end_signals
from pagekv.common.flags import integer, number

EXAMPLES = """\
  pagekv demo
  pagekv demo --prompt "And the king said" --max-tokens 120
  pagekv demo --model ~/models/Qwen3-0.6B
"""
PROMPTS = (
    "In the beginning God created the heaven and the earth. And the earth was",
    "And it came to pass in those days, that the king",
    "hacker: n. A person who enjoys",
)
# Fills many blocks, so that the second run shows what the prefix cache saves.
LONG_PROMPT = (
    "And it came to pass, when the king heard the words of the book, that he rent his clothes, and said unto his "
    "servants, Go ye, enquire of the LORD for me, and for the people, and for all the land, concerning the words of "
    "this book that is found: for great is the wrath that is kindled against us, because our fathers have not "
    "hearkened unto the words of this book. So they went, and came unto the prophet, and told her all these things; "
    "and she said unto them, Thus saith the LORD"
)
_SEED = 20
# Values for flags of `up` that the demo does not have: free ports, and only an executor and a manager.
OWN_STACK = {
    **{"host": LOOPBACK, "port": 0, "executor_port": None, "insecure": None, "certs": None, "identities": None},
    **{"no_http": True, "gateway": False, "replicas": 1, "gateway_port": None, "policy": None, "gateway_args": None},
}


def add(commands: Subparsers) -> None:
    parser = add_command(
        commands, "demo", "start the stack on free ports, generate some text, stop it again", run, examples=EXAMPLES
    )
    words = "prompt to use instead of the demo's own; may be given repeatedly"
    parser.add_argument("--prompt", type=_prompt, action="append", metavar="TEXT", help=words)
    # A manager refuses other values, but only after the start, which takes seconds.
    add_flags(
        parser,
        ("max-tokens", integer(1, 2**31 - 1), 60, "N", "tokens to generate for each prompt [60]"),
        ("temperature", number(0, 100), 0.8, "X", "sampling temperature; 0 is greedy [0.8]"),
    )
    add_stack_flags(parser)
    parser.set_defaults(**OWN_STACK)


def _prompt(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Raises PageKVError unless every prompt got text and the second run of the long prompt hit the cache."""
    begun = time.monotonic()
    config = stack_config(args, terminal)
    if words := oracle_without_tokenizer(config.executor_args, config.manager_args):
        raise UsageError(f"the demo shows text, which needs {words}")
    if words := without_tokenizer(config):
        raise UsageError(f"the demo shows text: {words}")
    stack = Stack(config)
    for signum in end_signals():
        # Raises KeyboardInterrupt like Ctrl-C: the stream ends, and leaving `with` stops the stack.
        signal.signal(signum, signal.default_int_handler)
    with stack:
        stack.start()
        wait_ready(stack, args, terminal)
        ready_s = time.monotonic() - begun
        with client_of(stack.target) as client:
            return _show(client, args, terminal, ready_s)


def _show(client: PageKVClient, args: argparse.Namespace, terminal: Terminal, ready_s: float) -> int:
    info = client.model_info()
    talk = not args.json
    if talk:
        terminal.print(f"PageKV: {describe(info, args.tp)}, ready in {ready_s:.1f} s")
    options: GenerateOptions = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": _SEED}
    completions: list[Completion] = []
    for prompt in args.prompt or PROMPTS:
        if talk:
            terminal.print()
            terminal.write(terminal.bold(prompt))
            completions.append(stream_text(client, prompt, options, terminal))
        else:
            completions.append(client.generate(prompt, **options))
    greedy: GenerateOptions = {"max_tokens": 16, "temperature": 0.0}
    (cold, first), (warm, second) = (stream_to(lambda text: None, client, LONG_PROMPT, greedy) for _ in range(2))
    if talk:
        terminal.print()
        terminal.print(f"The same prompt of {cold.prompt_tokens} tokens twice, greedy:")
        for name, completion, ttft in (("first", cold, first.ttft_s), ("second", warm, second.ttft_s)):
            cached, computed = completion.cached_tokens, completion.prompt_tokens - completion.cached_tokens
            terminal.print(
                f"  {name:6} time: {cached:3} tokens from the prefix cache, {computed:3} computed, "
                f"first token after {milliseconds(ttft)}"
            )
        terminal.print(f"  the texts are {'equal' if cold.text == warm.text else 'DIFFERENT'}")
    stats = client.stats()
    generated = all(any(c.isalpha() for c in completion.text) for completion in completions)
    hit = warm.cached_tokens >= info.block_size and cold.token_ids == warm.token_ids
    if talk:
        terminal.print()
        terminal.print(
            f"{stats.generated_tokens_total} tokens generated in {stats.steps_total} steps; "
            f"{stats.active_blocks} of {stats.num_device_blocks} blocks in use, "
            f"{stats.cached_free_blocks} free ones hold cached prefixes."
        )
        name = pagekv_command()
        terminal.print(f"Next: {name} up, and in a second terminal {name} chat, {name} stats, {name} bench.")
    else:
        terminal.json(
            {
                "model_id": info.model_id,
                "backend": info.backend,
                "ready_s": round(ready_s, 3),
                "texts": [completion.text for completion in completions],
                "prompt_tokens": warm.prompt_tokens,
                "cached_tokens": [cold.cached_tokens, warm.cached_tokens],
                "ttft_s": [first.ttft_s, second.ttft_s],
                "generated_tokens": stats.generated_tokens_total,
            }
        )
    if not generated:
        raise PageKVError("the model generated no text")
    if not hit:
        raise PageKVError("a prompt that was sent again did not hit the prefix cache, or gave another text")
    return 0
