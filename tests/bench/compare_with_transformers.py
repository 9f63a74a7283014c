"""The whole stack against transformers on the same model, workload and machine, in one run: `make bench`.

Two processes and gRPC on our side, in-process calls on theirs. Rounds are interleaved, medians are compared, and what
counts is the ratio, because machines are shared and noisy. Outputs are compared too: a wrong token is no speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import uvloop
from peers.models import write_model
from support.clients.calls import Caller, request_for
from support.clients.stack import Stack, running_stack
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

Prompts = list[list[int]]


def make_model(path: Path) -> LlamaForCausalLM:
    """The small one, 33.6M parameters in float32: hidden 512, 8 layers, 8/4 heads, vocabulary 8192; random weights."""
    return write_model("small", path)


def mixed_prompts(rng: random.Random, count: int) -> Prompts:
    """73 to 255 tokens each."""
    return [[rng.randrange(1, 8192) for _ in range(rng.randint(73, 255))] for _ in range(count)]


def shared_prompts(rng: random.Random, count: int) -> Prompts:
    """512 tokens in common and 32 own."""
    prefix = [rng.randrange(1, 8192) for _ in range(512)]
    return [[*prefix, *(rng.randrange(1, 8192) for _ in range(32))] for _ in range(count)]


def padded_generate(model: LlamaForCausalLM, prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
    """transformers' generate over one left-padded batch; seconds and output ids."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return time.perf_counter() - start, out[:, longest:].tolist()


def continuous_batching(model: LlamaForCausalLM, prompts: Prompts, new: int) -> float:
    """transformers' own continuous batching over its paged cache; seconds."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=2048, num_blocks=1024, page_size=32)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    return time.perf_counter() - start


async def through_stack(stack: Stack, prompts: Prompts, new: int) -> tuple[float, list[list[int]], int]:
    """All prompts at once through manager and executor; seconds, output ids, cached tokens."""
    async with Caller(stack.target) as caller:
        requests = [request_for(p, max_tokens=new, ignore_eos=True) for p in prompts]
        start = time.perf_counter()
        results = await caller.generate_many(requests)
        seconds = time.perf_counter() - start
        return seconds, [r.tokens for r in results], sum(r.cached_tokens for r in results)


def agreement(a: list[list[int]], b: list[list[int]]) -> str:
    """How many of the outputs are equal token for token."""
    return f"{sum(x == y for x, y in zip(a, b, strict=True))}/{len(a)}"


def measure(model: LlamaForCausalLM, stack: Stack, workload: str, args: argparse.Namespace) -> dict[str, object]:
    """Interleaved rounds of one workload, fresh prompts each round so that nothing is cached between rounds."""
    make, new = (mixed_prompts, 64) if workload == "mixed" else (shared_prompts, 32)
    tokens = args.requests * new
    ours: list[float] = []
    padded: list[float] = []
    batched: list[float] = []
    equal, cached = "", 0
    rounds = args.rounds + 1  # the first round warms both sides up and is not counted
    for number in range(rounds):
        prompts = make(random.Random(number), args.requests)
        # The client shares the cores with what it measures, so it runs on the loop that costs least, as the servers do.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            seconds, outputs, cached = runner.run(through_stack(stack, prompts, new))
        peer_seconds, peer_outputs = padded_generate(model, prompts, new)
        equal = agreement(outputs, peer_outputs)
        if number:
            ours.append(tokens / seconds)
            padded.append(tokens / peer_seconds)
        print(
            f"  {workload} {number}/{args.rounds}: ours {tokens / seconds:.0f} tok/s, "
            f"padded generate {tokens / peer_seconds:.0f} tok/s, equal outputs {equal}",
            file=sys.stderr,
        )
    for number in range(args.batching_rounds + 1 if args.batching_rounds else 0):
        rate = tokens / continuous_batching(model, prompts, new)
        if number:  # its first round warms up, too
            batched.append(rate)
        print(f"  {workload} {number}/{args.batching_rounds}: continuous batching {rate:.0f} tok/s", file=sys.stderr)
    row: dict[str, object] = {
        "workload": workload,
        "requests": args.requests,
        "new_tokens": new,
        "pagekv_tok_s": round(statistics.median(ours)),
        "padded_generate_tok_s": round(statistics.median(padded)),
        "ratio_to_padded": round(statistics.median(a / b for a, b in zip(ours, padded, strict=True)), 2),
        "cached_tokens_last_round": cached,
        "equal_outputs_last_round": equal,
    }
    if batched:
        row["continuous_batching_tok_s"] = round(statistics.median(batched))
        row["ratio_to_continuous_batching"] = round(statistics.median(ours) / statistics.median(batched), 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each workload [5]")
    parser.add_argument(
        "--batching-rounds", type=int, default=1, help="measured rounds of transformers' continuous batching [1]"
    )
    parser.add_argument("--workload", choices=("mixed", "shared", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        print(
            f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, "
            f"torch with {torch.get_num_threads()} threads",
            file=sys.stderr,
        )
        with running_stack(["--model", directory], ["--tokenizer", ""]) as stack:
            names = ("mixed", "shared") if args.workload == "both" else (args.workload,)
            rows = [measure(model, stack, name, args) for name in names]
    if args.json:
        print(json.dumps({"torch_threads": torch.get_num_threads(), "rows": rows}))
        return 0
    for row in rows:
        print()
        for key, value in row.items():
            print(f"{key.replace('_', ' '):32} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
