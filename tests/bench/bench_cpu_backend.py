"""The CPU backend alone, driven directly, against transformers' padded `generate` in the same process and run.

No processes, no gRPC, no manager: what this measures is the executor's own speed. Rounds are interleaved and ratios of
neighbouring rounds are reported, because machines are shared. `--breakdown` shows where a decode step's time goes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from compare_with_transformers import agreement, make_model, mixed_prompts, padded_generate, shared_prompts

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.backend import CpuBackend

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
TOKEN_BUDGET = 2048
WORKLOADS: dict[str, tuple[Any, int, int]] = {
    # Prompts, new tokens, leading tokens in common.
    "mixed": (mixed_prompts, 64, 0),
    "shared": (shared_prompts, 32, 512),
}


class MiniManager:
    """Decodes first, then prefill in order under the token budget; prefix blocks are shared from the start."""

    def __init__(self, backend: CpuBackend, prompts: list[list[int]], new: int, shared: int) -> None:
        self._backend = backend
        self._free = list(range(NUM_BLOCKS))
        random.Random(0).shuffle(self._free)
        self._goal = {index: len(prompt) + new for index, prompt in enumerate(prompts)}
        prefix = [self._free.pop() for _ in range(shared // BLOCK_SIZE)]
        self.states = [
            SequenceState(index, list(prompt), len(prompt), list(prefix), shared if index else 0, Sampling())
            for index, prompt in enumerate(prompts)
        ]

    def step(self) -> bool:
        """False when everything is generated."""
        left = [state for state in self.states if len(state.token_ids) < self._goal[state.seq_id]]
        left.sort(key=lambda state: len(state.token_ids) - state.computed_tokens > 1)
        budget, scheduled = TOKEN_BUDGET, []
        for state in left:
            count = min(budget, len(state.token_ids) - state.computed_tokens)
            if count:
                while len(state.block_table) * BLOCK_SIZE < state.computed_tokens + count:
                    state.block_table.append(self._free.pop())
                scheduled.append(Scheduled(state, state.computed_tokens, count))
                budget -= count
        if not scheduled:
            return False
        sampled = self._backend.launch(scheduled).collect()
        for item in scheduled:
            item.state.computed_tokens += item.count
            if item.samples:
                item.state.token_ids.append(sampled[item.state.seq_id].token_id)
        return True


def run_backend(
    backend: CpuBackend, prompts: list[list[int]], new: int, shared: int
) -> tuple[float, list[list[int]], list[float]]:
    """Seconds, output ids, and seconds of the steps that only decode."""
    manager = MiniManager(backend, prompts, new, shared)
    decodes = []
    begin = time.perf_counter()
    while True:
        is_decode = all(state.computed_tokens >= state.num_prompt_tokens for state in manager.states)
        step_begin = time.perf_counter()
        if not manager.step():
            break
        if is_decode:
            decodes.append(time.perf_counter() - step_begin)
    seconds = time.perf_counter() - begin
    return seconds, [list(state.token_ids[state.num_prompt_tokens :]) for state in manager.states], decodes


def measure(backend: CpuBackend, model: Any, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """One workload, interleaved; the first round warms up."""
    make, new, shared = WORKLOADS[workload]
    ours, theirs, steps, equal = [], [], [], ""
    for number in range(args.rounds + 1):
        prompts = make(random.Random(number), args.requests)
        seconds, outputs, decodes = run_backend(backend, prompts, new, shared)
        peer_seconds, peer_outputs = padded_generate(model, prompts, new)
        equal = agreement(outputs, peer_outputs)
        if number:
            ours.append(args.requests * new / seconds)
            theirs.append(args.requests * new / peer_seconds)
            steps += decodes
        print(
            f"  {workload} {number}/{args.rounds}: backend {args.requests * new / seconds:.0f} tok/s, "
            f"padded generate {args.requests * new / peer_seconds:.0f} tok/s, equal outputs {equal}",
            file=sys.stderr,
        )
    return {
        "workload": workload,
        "requests": args.requests,
        "new_tokens": new,
        "backend_tok_s": round(statistics.median(ours)),
        "padded_generate_tok_s": round(statistics.median(theirs)),
        "ratio_to_padded": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
        "decode_step_ms_median": round(statistics.median(steps) * 1e3, 1),
        "decode_step_ms_best": round(min(steps) * 1e3, 1),
        "equal_outputs_last_round": equal,
    }


def print_breakdown(backend: CpuBackend, workload: str, num_requests: int) -> None:
    """The operators of a whole run, dearest first."""
    from torch.profiler import ProfilerActivity, profile

    make, new, shared = WORKLOADS[workload]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run_backend(backend, make(random.Random(0), num_requests), new, shared)
    print(f"\n{workload}:\n{recorded.key_averages().table(sort_by='self_cpu_time_total', row_limit=15)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each workload [5]")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per core [0]")
    parser.add_argument("--workload", choices=(*WORKLOADS, "both"), default="both")
    parser.add_argument("--breakdown", action="store_true", help="also show time per operator")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    names = tuple(WORKLOADS) if args.workload == "both" else (args.workload,)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        backend = CpuBackend(Path(directory), "bench", threads=args.threads)
    backend.allocate(BLOCK_SIZE, NUM_BLOCKS, 0)
    rows = [measure(backend, model, name, args) for name in names]
    if args.json:
        print(json.dumps({"torch_threads": torch.get_num_threads(), "rows": rows}))
    else:
        for row in rows:
            print()
            for key, value in row.items():
                print(f"{key.replace('_', ' '):28} {value}")
    if args.breakdown:
        for name in names:
            print_breakdown(backend, name, args.requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
