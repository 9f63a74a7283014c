"""The cost of a group of ranks: `make bench-ranks` (ARGS=--quick; ARGS="--only hand-on,manager,tokens").

hand-on: the time that handing a step on adds to one that takes none. manager: its CPU time per step with 1, 2 and 8
ranks of the oracle, and how long executors wait, at steps of 20 ms, for callers that are told of a request's end alone:
what a message to a caller costs depends on how far the caller is behind, and it shares a core with the ranks. tokens:
output tokens per second of two CPU ranks of one thread each, beside one process of two threads, in float32: of four
layers of Llama 3 8B, and of a Llama of 33.6M parameters, which nobody needs to split.

Everything is measured in turns, and ratios are those of one round: others on the machine cost all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.clients.calls import Caller, aio_channel, request_for
from support.clients.stack import ORACLE, Process, Stack, running_executor, running_stack

from pagekv.executor.backend.interface import LAYOUT
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

RANKS = (1, 2, 8)
SEQUENCES = 64
# Of `manager`, in milliseconds.
STEP_MS = 20
# Of `manager`, in seconds: for prompts, and for a measurement.
ENTRY_S, ROUND_S = 0.4, 2.0
# Of `tokens`.
PROMPTS, PROMPT_TOKENS = 16, 96
# At most; of idle, at 2 ranks.
CPU_BAR, IDLE_BAR, HAND_ON_BAR_US = 0.03, 0.01, 300
# At least.
TOKENS_BAR = 0.85


def cpu_s(pid: int) -> float:
    """Seconds of CPU time of a process so far, to the nanosecond: its clock, as the kernel numbers it."""
    return time.clock_gettime((~pid << 3) | 2)


def spread(numbers: Sequence[float], digits: int = 3) -> str:
    """Median, how far it may be off, and the quartiles around it."""
    low, middle, high = statistics.quantiles(numbers, n=4)
    # Of the median of numbers that are normally distributed between their quartiles; few lie far outside.
    error = 0.93 * (high - low) / math.sqrt(len(numbers))
    shown = f"{middle:.{digits}f} (standard error {error:.{digits}f}"
    return f"{shown}, quartiles {low:.{digits}f} to {high:.{digits}f})"


def verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def in_turn(count: int, of: Sequence[int]) -> Iterator[list[int]]:
    """`count` rounds, each of which begins with another one."""
    for number in range(count):
        first = number % len(of)
        yield [*of[first:], *of[:first]]


def keep_apart(running: Mapping[int, Stack]) -> None:
    """Managers on one core, everything else on the others: what ranks take of a core is no cost of the manager."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return
    pin(os.getpid(), others)
    for stack in running.values():
        pin(stack.manager.pid, [first])
        executor = stack.executor
        for pid in [executor.pid, *(executor.rank_pids().values() if executor.ranks > 1 else ())]:
            pin(pid, others)


def pin(pid: int, cores: list[int]) -> None:
    """All threads of a process; threads that they start are where they are."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


async def decode(stack: Stack) -> tuple[float, float]:
    """CPU microseconds of the manager per step, and the share of time that the executor was idle. Prompts are not
    counted, nor streams that end.
    """
    tokens = int(1.2e3 * (ENTRY_S + ROUND_S) / STEP_MS)
    async with Caller(stack.target) as caller:
        requests = [request_for([index, 5, 7], max_tokens=tokens, ignore_eos=True) for index in range(SEQUENCES)]
        for request in requests:
            request.only_complete = True
        calls = [asyncio.ensure_future(caller.generate(request)) for request in requests]
        # By the clock, so that the load is nothing but steps.
        await asyncio.sleep(ENTRY_S)
        before, cpu = await caller.stats(), cpu_s(stack.manager.pid)
        await asyncio.sleep(ROUND_S)
        used, after = cpu_s(stack.manager.pid) - cpu, await caller.stats()
        await asyncio.gather(*calls)
    steps = after.steps_total - before.steps_total
    idle = after.executor_idle_us_total - before.executor_idle_us_total
    busy = after.executor_busy_us_total - before.executor_busy_us_total
    return 1e6 * used / steps, idle / max(1, idle + busy)


def manager_and_idle(rounds: int, ranks: Sequence[int]) -> None:
    from compare_with_transformers import make_model

    rows: dict[int, list[tuple[float, float]]] = {count: [] for count in ranks}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stacks:
        # The demo model has fewer query heads than there are ranks.
        make_model(Path(directory))
        executor = ["--backend", "oracle", "--model", directory, "--step-time-ms", str(STEP_MS)]
        manager = ["--num-device-blocks", "8192", "--tokenizer", "none"]
        running = {count: stacks.enter_context(running_stack(executor, manager, ranks=count)) for count in ranks}
        keep_apart(running)
        # One that is not counted: first calls of everything.
        for turn in [[*ranks], *in_turn(rounds, ranks)]:
            for count in turn:
                rows[count].append(asyncio.run(decode(running[count])))
    found = {count: each[1:] for count, each in rows.items()}
    for count, each in found.items():
        ratios = [cpu / base for (cpu, _), (base, _) in zip(each, found[ranks[0]], strict=True)]
        idle = statistics.median(share for _, share in each)
        words = f"{count} ranks: manager {statistics.median(cpu for cpu, _ in each):.0f} us of CPU a step"
        if count > 1:
            holds = abs(statistics.median(ratios) - 1) <= CPU_BAR
            words += f", {spread(ratios)} of 1 rank's (within {CPU_BAR:.0%}: {verdict(holds)})"
        print(f"{words}; idle {idle:.2%} (at most {IDLE_BAR:.0%}: {verdict(idle <= IDLE_BAR)})", flush=True)


def messages(epoch: int, count: int) -> Iterator[pb.StepRequest]:
    """A sequence that enters, and decodes."""
    sampling = pb.StepSampling(top_p=1, repetition_penalty=1)
    new = pb.NewSequence(seq_id=1, token_ids=[1, 2, 3], num_prompt_tokens=3, block_ids=range(128), sampling=sampling)
    yield pb.StepRequest(epoch=epoch, step=1, new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[3])
    for step in range(2, count):
        yield pb.StepRequest(epoch=epoch, step=step)


async def round_trip_us(executor: Process, count: int) -> float:
    """Microseconds from a step to its result, one at a time: the median. Between them the client sleeps: one that
    looked again and again would take a core from the ranks.
    """
    attach = pb.AttachRequest(
        manager_id="bench", block_size=16, num_device_blocks=300, layout=LAYOUT, contract_revision=1
    )
    took = []
    async with aio_channel(executor.target) as channel:
        stub: Any = pb_grpc.ExecutorServiceStub(channel)
        epoch = (await stub.Attach(attach)).epoch
        call = stub.Run()
        for message in messages(epoch, count):
            begin = time.perf_counter()
            await call.write(message)
            await call.read()
            took.append(1e6 * (time.perf_counter() - begin))
        await call.done_writing()
    return statistics.median(took[10:])


def hand_on(rounds: int, steps: int) -> None:
    found: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stacks:
        executors = {count: stacks.enter_context(running_executor(ORACLE, ranks=count)) for count in found}
        for turn in in_turn(rounds, (1, 2)):
            for count in turn:
                found[count].append(asyncio.run(round_trip_us(executors[count], steps)))
    more = [two - one for one, two in zip(found[1], found[2], strict=True)]
    print(
        f"a step that takes no time, there and back: 1 rank {statistics.median(found[1]):.0f} us, 2 ranks "
        f"{statistics.median(found[2]):.0f} us; 2 ranks take {spread(more, 0)} us more "
        f"(at most {HAND_ON_BAR_US}: {verdict(statistics.median(more) <= HAND_ON_BAR_US)})",
        flush=True,
    )


async def generate(stack: Stack, number: int, new_tokens: int) -> tuple[float, float]:
    """Output tokens per second of a round: all of it, and its decodes alone, from the first token of the last one."""
    prompts = [[number + 1, index + 1, *range(2, PROMPT_TOKENS)] for index in range(PROMPTS)]
    async with Caller(stack.target) as caller:
        begin = time.perf_counter()
        requests = [request_for(prompt, max_tokens=new_tokens, ignore_eos=True) for prompt in prompts]
        await asyncio.gather(*(caller.generate(request) for request in requests))
        took = time.perf_counter() - begin
        begin = time.perf_counter()
        # All of it is in the cache but for the last block.
        await asyncio.gather(*(caller.generate(request) for request in requests))
        again = time.perf_counter() - begin
    return PROMPTS * new_tokens / took, PROMPTS * new_tokens / again


def make_wide_model(path: Path) -> None:
    """0.9 billion parameters in float32, 3.6 GB, random: four layers of Llama 3 8B, with a vocabulary of 8,192."""
    import torch
    from gpu_first.llama import llama_3_8b
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = llama_3_8b(layers=4)
    config.vocab_size, config.dtype = 8192, torch.float32
    LlamaForCausalLM(config).save_pretrained(path)


def tokens_per_s(rounds: int) -> None:
    from compare_with_transformers import make_model

    print("four layers of Llama 3 8B:", flush=True)
    tokens_of(make_wide_model, max(3, rounds // 2), new_tokens=24)
    print("33.6M parameters:", flush=True)
    tokens_of(make_model, rounds, new_tokens=64)


def tokens_of(make: Callable[[Path], object], rounds: int, new_tokens: int) -> None:
    """Of one model."""
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stacks:
        make(Path(directory))
        common = ["--model", directory, "--dtype", "float32", "--kv-memory", "256MiB"]
        running = {
            count: stacks.enter_context(
                running_stack([*common, "--threads", str(2 // count)], ["--tokenizer", "none"], ranks=count)
            )
            for count in found
        }
        for number, turn in enumerate([[1, 2], *in_turn(rounds, (1, 2))]):
            for count in turn:
                found[count].append(asyncio.run(generate(running[count], number, new_tokens)))
    for place, name in enumerate(("with prompts", "decodes, prompts cached")):
        one, two = ([each[place] for each in found[count][1:]] for count in (1, 2))
        ratios = [its / other for its, other in zip(two, one, strict=True)]
        print(
            f"  {name}: 1 process of 2 threads {statistics.median(one):.0f} tokens/s, 2 ranks of 1 thread "
            f"{statistics.median(two):.0f}: {spread(ratios)} "
            f"(at least {TOKENS_BAR}: {verdict(statistics.median(ratios) >= TOKENS_BAR)})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no 8 ranks")
    parser.add_argument("--only", default="hand-on,manager,tokens", help="parts to measure, separated by commas")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {' '.join(f'{each:.1f}' for each in os.getloadavg())} before", flush=True)
    parts = {
        "hand-on": lambda: hand_on(*((4, 300) if args.quick else (20, 1000))),
        "manager": lambda: manager_and_idle(*((4, RANKS[:2]) if args.quick else (36, RANKS))),
        "tokens": lambda: tokens_per_s(3 if args.quick else 7),
    }
    for name in args.only.split(","):
        if name not in parts:
            parser.error(f"--only: unknown {name!r}; known are {', '.join(parts)}")
        parts[name]()
    print(f"load {' '.join(f'{each:.1f}' for each in os.getloadavg())} after", flush=True)


if __name__ == "__main__":
    main()
