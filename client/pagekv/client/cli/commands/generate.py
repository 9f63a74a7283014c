"""`pagekv generate`: text from a prompt, printed as it arrives."""

from __future__ import annotations

import argparse

from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.parser import Subparsers, add_command, add_identity, add_prompt, read_prompt
from pagekv.client.cli.sampling_flags import add_beams, add_sampling, options_of
from pagekv.client.cli.streamed_answer import stream_to, summary, times
from pagekv.client.cli.terminal import Terminal, counted
from pagekv.client.client import PageKVClient
from pagekv.client.generation_types import Completion, GenerateOptions, Prompt

EXAMPLES = """\
  pagekv generate "In the beginning" --max-tokens 60
  pagekv generate "Once" --temperature 0 --stop "."
  pagekv generate "Once" -n 3 --seed 7 --json
  pagekv generate "Once" --beam-width 8 -n 3 --length-penalty 0.8
  cat story.txt | pagekv generate -
"""


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "generate", "generate text from a prompt", run, examples=EXAMPLES)
    add_prompt(parser)
    add_connection(parser, timeout="seconds to wait for the whole answer [no limit]")
    add_identity(parser)
    parser.add_argument("-n", "--n", type=int, default=1, metavar="N", help="independent continuations, 1 to 64 [1]")
    add_sampling(parser, max_tokens=128)
    add_beams(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Streams one continuation, or prints several when all have ended."""
    prompt, options = read_prompt(args), options_of(args)
    with connect(args) as client:
        if args.n != 1 or args.beam_width:
            completions = client.generate_n(prompt, args.n, **options)
            if args.json:
                terminal.json({"completions": completions})
                return 0
            for completion in completions:
                terminal.note(headline(completion))
                terminal.print(shown_text(completion))
        elif args.json:
            completion, watch = stream_to(lambda text: None, client, prompt, options)
            rate = watch.tokens_per_s(completion.completion_tokens)
            terminal.json({"completions": [completion], "ttft_s": watch.ttft_s, "tokens_per_s": rate})
        else:
            stream_text(client, prompt, options, terminal)
    return 0


def stream_text(client: PageKVClient, prompt: Prompt, options: GenerateOptions, terminal: Terminal) -> Completion:
    """Writes the text as it arrives, a line end, and the summary on standard error."""
    completion, watch = stream_to(terminal.write, client, prompt, options)
    terminal.print("" if completion.text else shown_text(completion))
    terminal.note(summary(completion, watch))
    return completion


def headline(completion: Completion) -> str:
    """The line above the text of one of several sequences: index, tokens, finish reason, and the log-probability if it
    is known.
    """
    count = completion.completion_tokens
    parts = [counted(count, "token"), completion.finish_reason]
    if completion.preemptions:
        parts.append(f"preempted {times(completion.preemptions)}")
    if completion.cumulative_logprob is not None:
        mean = completion.cumulative_logprob / max(count, 1)
        parts.append(f"log-probability {completion.cumulative_logprob:.3f}, {mean:.3f} a token")
    return f"--- {completion.index}: {' · '.join(parts)}"


def shown_text(completion: Completion) -> str:
    """The text; token ids when the server has no tokenizer."""
    return completion.text or " ".join(map(str, completion.token_ids))
