"""The cost of tenants that flood the server to one that does not: its time to first token, and its hit rate.

Both processes with the demo model on the CPU, and TLS, which keys travel by. The tenant `quiet` sends a prompt of 512
tokens that are always the same and 32 that are new, 16 tokens of output, one request after the other: alone, beside 4
flooders and beside 32, each a tenant of weight 1 that keeps 8 requests of 256 random tokens and 64 tokens of output
going. The pool is smaller than what 32 flooders want at once. So it is done on three stacks: every caller a tenant,
with a floor for `quiet` besides, and all of them one tenant, as without tenants. The stacks are measured in turns.
Flooders are one process of their own and are told of a request's end alone, for reading is not what is measured; all
of it shares this machine's cores, so what counts is the comparison with `alone` in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
from support.clients.calls import request_for
from support.clients.protected_stack import ProtectedStack, key_section, protected_stack

from pagekv.client.cli.terminal import table
from pagekv.v1 import inference_service_pb2_grpc, operator_service_pb2, operator_service_pb2_grpc

EXECUTOR = ("--model", "demo", "--dtype", "float32", "--threads", "1", "--kv-memory", "512MiB")
NUM_BLOCKS = 2048
# The prefix and one prompt's own tokens and output, in blocks of 16 tokens, and a block or two to spare.
FLOOR = 40
MAX_FLOODERS = 32
STREAMS = 8
PREFIX, OWN, OUTPUT = 512, 32, 16
FLOOD_PROMPT, FLOOD_OUTPUT = 256, 64
VOCAB = 256
# Until streams of flooders are at different places in their outputs.
SETTLE_S = 4.0
ROUNDS = 2
# At most so many times the time to first token alone, by flooders, and at least so much of the hit rate.
BARS = {4: 2.0, 32: 2.5}
HIT_BAR = 0.9
SETUPS = ("each its own tenant", "the same, quiet has a floor", "all one tenant")


@dataclass
class Cell:
    """`quiet` on one stack beside so many flooders."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Of everybody: steps, their milliseconds at the executor, and output tokens in so many seconds.
    steps: int = 0
    steps_ms: float = 0.0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def first_ms(self) -> float:
        return 1000 * statistics.median(self.first_s)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@contextmanager
def tenants_stack(setup: str, folder: Path) -> Iterator[ProtectedStack]:
    """A stack whose callers are tenants of their own, or one."""
    names = ["quiet", *(f"flooder{number}" for number in range(MAX_FLOODERS))]
    shared = 'tenant = "all"\n' if setup == SETUPS[2] else ""
    identities = [key_section(name, f"{name}-key", ["generate", "observe"]) + shared for name in names]
    floor = f"[tenants.quiet]\nfloor_blocks = {FLOOR}\n" if setup == SETUPS[1] else ""
    (folder / "tenants.toml").write_text(f"[default]\n{floor}")
    flags = [f"--tenants={folder / 'tenants.toml'}", f"--num-device-blocks={NUM_BLOCKS}"]
    with protected_stack(folder, EXECUTOR, flags, identities) as stack:
        yield stack


def key_of(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}-key"),)


def flood(target: str, ca: bytes, key: bytes, cert: bytes, flooders: int) -> None:
    """A process of flooders, until it is ended."""

    async def stream(inference: inference_service_pb2_grpc.InferenceServiceAsyncStub, name: str, seed: str) -> None:
        chance = random.Random(seed)
        while True:
            prompt = [chance.randrange(1, VOCAB) for _ in range(FLOOD_PROMPT)]
            request = request_for(prompt, FLOOD_OUTPUT, ignore_eos=True)
            request.only_complete = True
            try:
                async for _ in inference.Generate(request, metadata=key_of(name)):
                    pass
            except grpc.aio.AioRpcError as error:
                # The queue of everybody is full.
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        async with grpc.aio.secure_channel(target, credentials) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            inference = cast("inference_service_pb2_grpc.InferenceServiceAsyncStub", stub)
            await asyncio.gather(
                *(
                    stream(inference, f"flooder{number}", f"{time.time()} {number} {nth}")
                    for number in range(flooders)
                    for nth in range(STREAMS)
                )
            )

    asyncio.run(all_of_them())


@contextmanager
def flooded(stack: ProtectedStack, flooders: int) -> Iterator[None]:
    """The stack beside so many flooders, none being nothing."""
    if not flooders:
        yield
        return
    pair = stack.client_pair
    given = (stack.stack.target, stack.authority.ca.read_bytes(), pair.key_pem, pair.pem, flooders)
    process = multiprocessing.get_context("spawn").Process(target=flood, args=given, daemon=True)
    process.start()
    try:
        time.sleep(SETTLE_S)
        if not process.is_alive():
            raise SystemExit("the flooders' process ended")
        yield
    finally:
        process.kill()
        process.join()


class Quiet:
    """The tenant that is measured, on one stack."""

    def __init__(self, channel: grpc.Channel, pause_s: float = 0.0) -> None:
        """`pause_s`: the longest time between two requests; each is drawn, all as likely."""
        self._pause_s = pause_s
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._operator = operator_service_pb2_grpc.OperatorServiceStub(channel)
        self._chance = random.Random(0)
        self._prefix = self._tokens(PREFIX)

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(1, VOCAB) for _ in range(count)]

    def stats(self) -> operator_service_pb2.GetStatsResponse:
        return self._operator.GetStats(operator_service_pb2.GetStatsRequest(), metadata=key_of("quiet"), timeout=120)

    def wait_idle(self) -> None:
        while (stats := self.stats()).running_sequences or stats.waiting_sequences:
            time.sleep(0.05)

    def ask(self, cell: Cell) -> None:
        """One request, and its pause before."""
        time.sleep(self._chance.uniform(0, self._pause_s))
        request = request_for([*self._prefix, *self._tokens(OWN)], OUTPUT, ignore_eos=True)
        begin, times = time.perf_counter(), []
        for response in self._inference.Generate(request, metadata=key_of("quiet"), timeout=600):
            times.append(time.perf_counter())
            if response.HasField("complete"):
                cell.cached_tokens += response.complete.cached_tokens
        cell.prompt_tokens += PREFIX + OWN
        cell.first_s.append(times[0] - begin)
        # The last two messages come together.
        cell.gaps_s += [after - before for before, after in pairwise(times[:-1])]

    def measure(self, cell: Cell, requests: int) -> None:
        """So many requests, behind one that is not measured."""
        self.ask(Cell())
        before, begin = self.stats(), time.perf_counter()
        for _ in range(requests):
            self.ask(cell)
        after = self.stats()
        cell.seconds += time.perf_counter() - begin
        cell.output_tokens += after.generated_tokens_total - before.generated_tokens_total
        cell.steps += after.steps_total - before.steps_total
        cell.steps_ms += (after.executor_busy_us_total - before.executor_busy_us_total) / 1000


def row(setup: str, flooders: int, cell: Cell, alone: Cell) -> list[str]:
    ratio, hits = cell.first_ms / alone.first_ms, cell.hit_rate / alone.hit_rate
    misses = ["first token"] if flooders and ratio > BARS[flooders] else []
    misses += ["hit rate"] if flooders and hits < HIT_BAR else []
    ordered = sorted(cell.first_s)
    return [
        *(setup, str(flooders), f"{cell.first_ms:.0f}", f"{1000 * ordered[int(0.9 * len(ordered))]:.0f}"),
        *(f"{ratio:.2f}", f"{cell.hit_rate:.3f}", f"{hits:.2f}"),
        *(f"{1000 * statistics.median(cell.gaps_s):.1f}", f"{cell.steps_ms / max(1, cell.steps):.1f}"),
        f"{cell.output_tokens / cell.seconds:.0f}",
        f"MISSED: {', '.join(misses)}" if misses else "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="requests of the tenant `quiet` in each row [24]")
    parser.add_argument("--pause", type=float, default=0.0, help="most seconds between two requests of `quiet` [0]")
    args = parser.parse_args()
    cells = {(setup, flooders): Cell() for setup in SETUPS for flooders in (0, *BARS)}
    with ExitStack() as opened:
        stacks: dict[str, tuple[ProtectedStack, Quiet]] = {}
        for setup in SETUPS:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            stack = opened.enter_context(tenants_stack(setup, folder))
            stacks[setup] = stack, Quiet(opened.enter_context(stack.channel()), args.pause)
        for number in range(ROUNDS):
            for setup, flooders in cells:
                stack, quiet = stacks[setup]
                with flooded(stack, flooders):
                    quiet.measure(cells[setup, flooders], max(1, args.requests // ROUNDS))
                quiet.wait_idle()
                line = row(setup, flooders, cells[setup, flooders], cells[setup, 0])
                print(f"  round {number + 1} of {ROUNDS}:", *line, file=sys.stderr, flush=True)
    rows = [row(*which, cell, cells[which[0], 0]) for which, cell in cells.items()]
    header = (
        *("", "flooders", "first token ms", "p90", "to alone", "hit rate", "to alone"),
        *("gap ms", "step ms", "tokens/s", "bars"),
    )
    print(table(rows, header, indent="  "))
    bars = ", ".join(f"{bar:g} beside {flooders}" for flooders, bar in BARS.items())
    print(f"bars: first token {bars} flooders; hit rate {HIT_BAR:g}. Load: {Path('/proc/loadavg').read_text().strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
