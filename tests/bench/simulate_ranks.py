"""64 ranks over 8 machines, simulated: `python tests/bench/simulate_ranks.py` (--json).

Rank 0's own cost is measured here, with the product's code: a `Leader` hands steps of 1,024 sequences to ranks that
answer at once, from another process. Everything else is simulated, step by step: rank 0 sends to one rank after the
other, each computes for a time that varies, every collective begins with the slowest rank, reports come back one by
one. Rates are assumptions, and said. The figures are predictions: no such group has run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pagekv.executor.backend.interface import MAX_LOGPROBS
from pagekv.executor.ranks.leader import Leader
from pagekv.executor.ranks.link import Kind, RankLink
from pagekv.executor.ranks.reports import RankReport
from pagekv.executor.ranks.watch import RankWatch
from pagekv.executor.rpc import wire
from pagekv.executor.session.state_digest import DIGEST_BYTES
from pagekv.executor.session.step_check import EpochLimits
from pagekv.steps.v1 import executor_service_pb2 as pb

DIGEST = bytes(DIGEST_BYTES)
# Slots of a block: so many sequences of the 1,024 need another one in a step.
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Plant:
    """Machines and model: seconds, bytes, operations per second."""

    per_machine: int = 8
    sequences: int = 1024
    context: int = 512
    layers: int = 80
    hidden: int = 8192
    kv_heads: int = 8
    head_size: int = 128
    parameters: float = 70e9
    element_bytes: int = 2
    # Of one device, as far as kernels reach them.
    memory_rate: float = 2.5e12
    compute_rate: float = 4e14
    # Of a device to the others of its machine, of a machine to the others, and of a message.
    inner_rate: float = 400e9
    outer_rate: float = 50e9
    inner_latency: float = 3e-6
    outer_latency: float = 10e-6
    # Standard deviation of a rank's compute time over its mean.
    jitter: float = 0.03

    def compute_s(self, ranks: int) -> float:
        """Seconds of a decode step on a rank without collectives: weights and keys are read, products are computed."""
        heads = max(1, self.kv_heads // ranks)
        token = 2 * self.layers * heads * self.head_size * self.element_bytes
        read = self.parameters * self.element_bytes / ranks + self.sequences * self.context * token
        return read / self.memory_rate + 2 * self.parameters * self.sequences / ranks / self.compute_rate

    def kv_bytes(self, ranks: int) -> float:
        """Bytes of KV cache on a rank."""
        heads = max(1, self.kv_heads // ranks)
        return 2.0 * self.layers * heads * self.head_size * self.element_bytes * self.sequences * self.context

    def all_reduce_s(self, ranks: int) -> float:
        """Rings: within each machine, and over machines, each of which has one line to the others."""
        size = self.sequences * self.hidden * self.element_bytes
        inner, outer = min(ranks, self.per_machine), max(1, ranks // self.per_machine)
        moved = 2 * size * ((inner - 1) / inner / self.inner_rate + (outer - 1) / outer / self.outer_rate)
        return moved + 2 * ((inner - 1) * self.inner_latency + (outer - 1) * self.outer_latency)


def step_message(number: int, sequences: int) -> pb.StepRequest:
    """A steady step: nothing but appended blocks."""
    seqs = range(number % BLOCK_SIZE, sequences, BLOCK_SIZE)
    return pb.StepRequest(epoch=5, step=number, append_seqs=seqs, append_blocks=[7 * seq + number for seq in seqs])


def answer_all(ends: list[socket.socket]) -> None:
    """The other ranks: each step is answered at once. In a process of its own, until rank 0 ends the group."""

    def answer(link: RankLink) -> None:
        while (message := link.receive()).kind is not Kind.BYE:
            if message.kind is Kind.STEP:
                number = pb.StepRequest.FromString(message.data).step
                link.send(Kind.REPORT, RankReport(5, number, DIGEST, 1000).to_bytes())

    threads = [threading.Thread(target=answer, args=(RankLink(each),)) for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measured_us(ranks: int, sequences: int, steps: int = 200) -> tuple[float, float]:
    """Microseconds of CPU that rank 0 takes for a step with so many ranks, and those in which its worker thread sends;
    medians.
    """
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    if not (child := os.fork()):
        # So that its links end with rank 0, however that ends.
        for ours, _ in pairs:
            ours.close()
        answer_all([theirs for _, theirs in pairs])
        os._exit(0)
    leader = Leader(RankWatch({rank: RankLink(ours) for rank, (ours, _) in enumerate(pairs, 1)}, 600.0))
    limits = EpochLimits(BLOCK_SIZE, 10**6, 0, 2**17, 2**17, sequences, MAX_LOGPROBS, frozenset())
    whole, sending = [], []
    for number in range(1, steps + 1):
        message = step_message(number, sequences)
        step = wire.step(message.SerializeToString())
        cpu, begin = time.process_time(), time.perf_counter()
        leader.hand_on(5, limits, step)
        sending.append(time.perf_counter() - begin)
        leader.collected(5, number, DIGEST, 1000)
        # All reports of this step, as a step that takes time has them.
        time.sleep(2e-3)
        whole.append(time.process_time() - cpu)
    leader.stop()
    os.waitpid(child, 0)
    return 1e6 * statistics.median(whole[50:]), 1e6 * statistics.median(sending[50:])


def simulated_s(plant: Plant, ranks: int, send_s: float, steps: int = 40) -> tuple[float, float]:
    """Seconds of a step, and of them those in collectives. Each step is handed on while the one before is computed."""
    rng = random.Random(ranks)
    compute, reduce_s = plant.compute_s(ranks), plant.all_reduce_s(ranks)
    parts = 2 * plant.layers
    now, handed, joined = 0.0, 0.0, 0.0
    for _ in range(steps):
        # Rank 0's thread is free for the next step when it has sent the one before.
        begins = [max(now, handed + send_s * rank / max(1, ranks - 1) + plant.outer_latency) for rank in range(ranks)]
        handed = max(now, handed + send_s)
        clocks = begins
        # Every collective waits for the slowest; a machine's mood lasts for a layer or so.
        for _ in range(parts):
            slowest = max(clock + compute / parts * max(0.5, rng.gauss(1, plant.jitter)) for clock in clocks)
            joined += reduce_s
            clocks = [slowest + reduce_s] * ranks
        now = clocks[0]
    return now / steps, joined / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    plant = Plant()
    rows = []
    for ranks in (8, 16, 32, 64, 128):
        rank_0_us, send_us = measured_us(ranks, plant.sequences)
        step_s, joined_s = simulated_s(plant, ranks, send_us * 1e-6)
        rows.append(
            {
                "ranks": ranks,
                "bytes a step": (ranks - 1) * (5 + step_message(1, plant.sequences).ByteSize()),
                "rank 0, CPU us a step (measured)": round(rank_0_us),
                "of it sending, us (measured)": round(send_us),
                "all-reduce, us": round(1e6 * plant.all_reduce_s(ranks)),
                "compute, ms": round(1e3 * plant.compute_s(ranks), 1),
                "collectives, ms": round(1e3 * joined_s, 1),
                "step, ms": round(1e3 * step_s, 1),
                "tokens/s": round(plant.sequences / step_s),
                "KV of a rank, GB": round(plant.kv_bytes(ranks) / 1e9, 1),
                "rank 0 busy": f"{rank_0_us * 1e-6 / step_s:.1%}",
            }
        )
    if args.json:
        print(json.dumps({"plant": asdict(plant), "rows": rows}))
        return
    print(plant)
    for name in rows[0]:
        print(f"{name:34}" + "".join(f"{row[name]!s:>10}" for row in rows))


if __name__ == "__main__":
    main()
