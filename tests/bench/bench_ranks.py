"""The cost of a group of ranks: `make bench-ranks` (ARGS=--quick).

The manager's CPU time per step, and how long executors wait, at steps of 20 ms with 1, 2 and 8 ranks of the oracle; and
the time that handing a step on adds to one that takes none. In turns, so that others on the machine cost all alike;
figures are the least of the rounds, which the machine's other work raises and never lowers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from support.clients.calls import Caller, request_for
from support.clients.stack import ORACLE, Stack, running_executor, running_stack

from pagekv.executor.backend.interface import LAYOUT
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

RANKS = (1, 2, 8)
SEQUENCES = 64


def cpu_s(pid: int) -> float:
    """Seconds of CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def decode(stack: Stack, tokens: int) -> tuple[float, float]:
    """CPU microseconds of the manager per step, and the share of time that the executor was idle, of so many tokens of
    each sequence.
    """
    async with Caller(stack.target) as caller:
        before, cpu = await caller.stats(), cpu_s(stack.manager.pid)
        requests = [request_for([index, 5, 7], max_tokens=tokens, ignore_eos=True) for index in range(SEQUENCES)]
        await asyncio.gather(*(caller.generate(request) for request in requests))
        after, used = await caller.stats(), cpu_s(stack.manager.pid) - cpu
    steps = after.steps_total - before.steps_total
    idle = after.executor_idle_us_total - before.executor_idle_us_total
    busy = after.executor_busy_us_total - before.executor_busy_us_total
    return 1e6 * used / steps, idle / max(1, idle + busy)


def manager_and_idle(rounds: int, tokens: int, ranks: Sequence[int]) -> None:
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in ranks}
    with ExitStack() as stacks:
        running = {
            count: stacks.enter_context(
                running_stack([*ORACLE, "--step-time-ms", "20"], ["--num-device-blocks", "8192"], ranks=count)
            )
            for count in ranks
        }
        for _ in range(rounds):
            for count, stack in running.items():
                found[count].append(asyncio.run(decode(stack, tokens)))
    base = min(cpu for cpu, _ in found[ranks[0]])
    for count, rows in found.items():
        cpu, idle = min(cpu for cpu, _ in rows), min(idle for _, idle in rows)
        print(f"{count} ranks: manager {cpu:6.0f} us of CPU a step ({cpu / base:.1%} of 1 rank's), idle {idle:.3%}")


def messages(epoch: int, count: int) -> Iterator[pb.StepRequest]:
    """A sequence that enters, and decodes."""
    sampling = pb.StepSampling(top_p=1, repetition_penalty=1)
    new = pb.NewSequence(seq_id=1, token_ids=[1, 2, 3], num_prompt_tokens=3, block_ids=range(128), sampling=sampling)
    yield pb.StepRequest(epoch=epoch, step=1, new_seqs=[new], scheduled_seqs=[1], scheduled_tokens=[3])
    for step in range(2, count):
        yield pb.StepRequest(epoch=epoch, step=step)


def round_trip_us(stub: pb_grpc.ExecutorServiceStub, count: int) -> list[float]:
    """Microseconds from each step to its result, one at a time, sorted."""
    attach = pb.AttachRequest(
        manager_id="bench", block_size=16, num_device_blocks=300, layout=LAYOUT, contract_revision=1
    )
    epoch = stub.Attach(attach).epoch
    begin, took = 0.0, list[float]()

    def timed() -> Iterator[pb.StepRequest]:
        nonlocal begin
        for message in messages(epoch, count):
            while len(took) < message.step - 1:
                time.sleep(0)
            begin = time.perf_counter()
            yield message

    for _ in stub.Run(timed()):
        took.append(1e6 * (time.perf_counter() - begin))
    return sorted(took[10:])


def hand_on(rounds: int, steps: int) -> None:
    least: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stacks:
        stubs = {}
        for count in least:
            executor = stacks.enter_context(running_executor(ORACLE, ranks=count))
            stubs[count] = pb_grpc.ExecutorServiceStub(stacks.enter_context(executor.channel()))
        for _ in range(rounds):
            for count, stub in stubs.items():
                found = round_trip_us(stub, steps)
                least[count].append(found[len(found) // 10])
    one, two = (min(each) for each in least.values())
    print(
        f"a step that takes no time, there and back: 1 rank {one:.0f} us, 2 ranks {two:.0f} us: {two - one:.0f} us more"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no 8 ranks")
    args = parser.parse_args()
    hand_on(*((3, 300) if args.quick else (8, 1000)))
    manager_and_idle(*((2, 60, RANKS[:2]) if args.quick else (4, 200, RANKS)))


if __name__ == "__main__":
    main()
