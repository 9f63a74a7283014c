"""The cost of the split into two processes: how long the executor waits for its next step, with as many client streams
attached as there are sequences. `make bench-split`; ARGS=--json for machines, ARGS=--quick for a minute.

The executor is the oracle, whose step lasts as long as it is told to, or as long as its checks take if that is more.
Manager and executor are the processes that users start, the clients are gRPC streams in one more process, all on this
machine: on two cores the three share them, so each one's CPU is printed. Idle is the share of the executor's time
between the end of one step and the beginning of the next, as it measured it and as GetStats says.

Before it, what a server that does nothing but write messages reaches with the same clients: gRPC's part of the limit.
After it, the size of a step's messages. Clients that behave badly: `bench_bad_clients.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from split_messages import Message, measure
from stream_load import Order, Report
from streams import heard, speaking, streaming
from support.clients.stack import Stack, running_stack

from pagekv.client import PageKVClient

FLOOR = Path(__file__).with_name("split_floor.py")
START_TIMEOUT_S = 120
# At so many sequences: (milliseconds a step takes, bound of the executor's idle share in percent).
BARS_AT = 256
BARS = {20.0: 2.0, 5.0: 5.0}
# At so long a step every stream has its token every step: so many tokens per message at most.
EVERY_STEP_MS = 20.0
TOKENS_PER_MESSAGE_BAR = 1.05
# A step that took so much longer than told measured another load than the one that the bars are about.
LONGEST_STEP = 1.2
# The bars are about two cores that nobody else uses.
MOST_STOLEN_PERCENT = 3.0
BYTES_BAR = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """One load for a while. CPU is in cores, of the whole process."""

    step_ms: float
    sequences: int
    pipeline_depth: int
    steps_per_s: float
    # Milliseconds a step really took on the executor.
    step_took_ms: float
    idle_percent: float
    tokens_per_s: float
    tokens_per_message: float
    messages_per_s: float
    # Messages per step of the stream that had the fewest.
    fewest_per_step: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    manager_cpu: float
    executor_cpu: float
    clients_cpu: float
    # Of the machine's CPU time, what its hypervisor gave to others.
    stolen_percent: float


@contextmanager
def stack(step_ms: float, depth: int, *manager: str) -> Iterator[Stack]:
    """Both processes, with room for everything, and the demo model's tokenizer; `manager`: more flags of its own."""
    executor = ["--backend", "oracle", "--model", "demo", "--step-time-ms", f"{step_ms:g}", "--kv-memory", "128MiB"]
    executor += ["--max-model-len", "65536", "--max-sequences", "1100"]
    with running_stack(executor, ["--pipeline-depth", str(depth), "--max-running", "1100", *manager]) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Floor:
    """The most that gRPC for Python can do here: nothing but messages, as fast as they go."""

    streams: int
    messages_per_s: float
    server_cpu: float
    clients_cpu: float


def floor(streams: int, seconds: float) -> Floor:
    """Measures it."""
    _say(f"a bare server and {streams} streams")
    with (
        speaking([sys.executable, str(FLOOR)]) as server,
        streaming(Order(f"127.0.0.1:{heard(server)}", streams)) as load,
    ):
        load.begin()
        begun, cpu = time.perf_counter(), _cpu_s(server.pid)
        time.sleep(seconds)
        elapsed, cpu = time.perf_counter() - begun, _cpu_s(server.pid) - cpu
        report = load.end()
    return Floor(streams, report.messages / elapsed, cpu / elapsed, report.cpu_s / elapsed)


def run(stack: Stack, order: Order, seconds: float) -> tuple[Report, dict[str, float]]:
    """Loads the stack for a while: what the clients saw, and by how much counters rose, "seconds" among them."""
    with PageKVClient(stack.target, timeout=START_TIMEOUT_S, credentials=stack.callers) as client:
        with streaming(order) as load:
            load.begin()
            before = counters(stack, client)
            time.sleep(seconds)
            after = counters(stack, client)
            report = load.end()
        wait_idle(client)
    return report, {name: after[name] - before[name] for name in after}


def counters(stack: Stack, client: PageKVClient) -> dict[str, float]:
    """Counters of the manager, CPU seconds of both processes and of the machine, and the time."""
    stats = client.stats()
    return {
        "seconds": time.perf_counter(),
        "steps": stats.steps_total,
        "tokens": stats.generated_tokens_total,
        "idle_us": stats.executor_idle_us_total,
        "busy_us": stats.executor_busy_us_total,
        "manager": _cpu_s(stack.manager.pid),
        "executor": _cpu_s(stack.executor.pid),
        **_machine_s(),
    }


def _machine_s() -> dict[str, float]:
    """CPU seconds of all cores: all of them, and those that the hypervisor gave to others."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
    return {"all": sum(ticks), "stolen": ticks[7]}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_idle(client: PageKVClient) -> None:
    """Waits until nothing runs. Ends the benchmark where that does not come."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (stats := client.stats()).running_sequences or stats.waiting_sequences:
        if time.monotonic() > deadline:
            raise SystemExit("the streams of clients that are gone do not end")
        time.sleep(0.02)


def row(stack: Stack, step_ms: float, depth: int, order: Order, seconds: float) -> Row:
    """Loads the stack and works the figures out."""
    report, rose = run(stack, order, seconds)
    elapsed, steps = rose["seconds"], max(1.0, rose["steps"])
    return Row(
        step_ms=step_ms,
        sequences=order.streams,
        pipeline_depth=depth,
        steps_per_s=rose["steps"] / elapsed,
        step_took_ms=rose["busy_us"] / steps / 1000,
        idle_percent=100 * rose["idle_us"] / max(1.0, rose["idle_us"] + rose["busy_us"]),
        tokens_per_s=rose["tokens"] / elapsed,
        tokens_per_message=rose["tokens"] / max(1, report.messages),
        messages_per_s=report.messages / elapsed,
        fewest_per_step=report.fewest / steps,
        gap_p50_ms=report.gap_p50,
        gap_p99_ms=report.gap_p99,
        gap_max_ms=report.gap_max,
        manager_cpu=rose["manager"] / elapsed,
        executor_cpu=rose["executor"] / elapsed,
        clients_cpu=report.cpu_s / elapsed,
        stolen_percent=100 * rose["stolen"] / max(0.01, rose["all"]),
    )


def split_rows(step_times: list[float], counts: list[int], seconds: float) -> list[Row]:
    """Every step time and number of sequences, without and with pipelining."""
    rows: list[Row] = []
    for step_ms in step_times:
        for depth in (1, 2):
            _say(f"step of {step_ms:g} ms, pipeline depth {depth}: starting")
            with stack(step_ms, depth) as running:
                for count in counts:
                    rows.append(row(running, step_ms, depth, Order(running.target, count, seed=count), seconds))
                    _say("  " + _line(rows[-1]))
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


HEAD = (
    f"{'step':>5} {'took':>6} {'seqs':>5} {'depth':>5} {'idle':>7} {'tok/s':>7} {'tok/msg':>7} {'msg/s':>6} "
    f"{'fewest':>6} {'gap p50':>7} {'p99':>7} {'max':>7}   CPU: manager executor clients stolen"
)


def _line(row: Row) -> str:
    return (
        f"{row.step_ms:5g} {row.step_took_ms:6.2f} {row.sequences:5} {row.pipeline_depth:5} {row.idle_percent:6.2f}% "
        f"{row.tokens_per_s:7.0f} {row.tokens_per_message:7.2f} {row.messages_per_s:6.0f} {row.fewest_per_step:6.2f} "
        f"{row.gap_p50_ms:7.1f} {row.gap_p99_ms:7.1f} {row.gap_max_ms:7.1f}        {row.manager_cpu:7.2f} "
        f"{row.executor_cpu:8.2f} {row.clients_cpu:7.2f} {row.stolen_percent:5.1f}%"
    )


def show(least: Floor, rows: list[Row], messages: list[Message]) -> str:
    """The tables, what the columns are, and the bars."""
    lines = [
        f"a bare server, {least.streams} streams: {least.messages_per_s:.0f} messages a second, CPU: server "
        f"{least.server_cpu:.2f}, clients {least.clients_cpu:.2f} cores\n",
        HEAD,
        *map(_line, rows),
    ]
    lines.append(
        "step, took: milliseconds as told, and as on the executor. depth: steps in flight, 1 is without pipelining.\n"
        "idle: of the executor. fewest: messages per step of the stream that had the fewest. gap: milliseconds\n"
        "between two messages of a stream. CPU: cores; stolen: of all cores, by the hypervisor for others."
    )
    lines += ["", f"{'message':36} {'bytes':>7} {'most':>6} {'encode':>10} {'decode':>10}"]
    for message in messages:
        lines.append(
            f"{message.name:36} {message.mean_bytes:7.0f} {message.most_bytes:6} {message.encode_us:7.1f} us "
            f"{message.decode_us:7.1f} us"
        )
    return "\n".join([*lines, "", *bars(rows, messages)])


def bars(rows: list[Row], messages: list[Message]) -> list[str]:
    """Bars for two cores that nobody else uses. A bar that failed begins with MISSED."""
    lines = []
    for row in rows:
        bound = BARS.get(row.step_ms)
        if bound is None or row.sequences != BARS_AT or row.pipeline_depth == 1:
            continue
        where = f"at {row.step_ms:g} ms and {BARS_AT} sequences"
        if row.stolen_percent > MOST_STOLEN_PERCENT:
            lines.append(f"not measured: others took {row.stolen_percent:.1f} % of the machine {where}")
            continue
        if row.step_took_ms > LONGEST_STEP * row.step_ms:
            lines.append(f"not measured: steps took {row.step_took_ms:.1f} ms {where}")
            continue
        lines.append(_bar(row.idle_percent < bound, f"idle {row.idle_percent:.2f} % of {bound:g} % {where}"))
        told = f"{row.tokens_per_message:.2f} tokens per message"
        if row.step_ms >= EVERY_STEP_MS:
            holds = row.tokens_per_message <= TOKENS_PER_MESSAGE_BAR
            lines.append(_bar(holds, f"{told} of {TOKENS_PER_MESSAGE_BAR:g} {where}"))
        else:
            lines.append(f"no bar: {told} {where}")
    most = max(message.most_bytes for message in messages)
    return [*lines, _bar(most < BYTES_BAR, f"{most} of {BYTES_BAR} bytes per message at most")]


def _bar(holds: bool, what: str) -> str:
    return f"{'holds' if holds else 'MISSED'}: {what}"


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> int:
    """Command line; 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument(
        "--step-time-ms", type=_numbers, default=[1, 5, 20], help="milliseconds of a step (default: 1,5,20)"
    )
    parser.add_argument(
        "--sequences",
        type=_numbers,
        default=[1, 16, 256, 1024],
        help="running sequences, 1 to 1024 (default: 1,16,256,1024)",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds measured for each row (default: 3)")
    parser.add_argument("--quick", action="store_true", help="only the rows with bars, two seconds each")
    parser.add_argument("--json", action="store_true", help="print rows and messages as JSON")
    args = parser.parse_args()
    if args.quick:
        args.step_time_ms, args.sequences, args.seconds = list(BARS), [BARS_AT], 2.0
    counts = [int(count) for count in args.sequences]
    if not all(1 <= count <= 1024 for count in counts):
        parser.error(f"--sequences: each must be from 1 to 1024, got {counts}")
    messages = measure(BARS_AT, 64)
    least = floor(BARS_AT, args.seconds)
    rows = split_rows(args.step_time_ms, counts, args.seconds)
    if args.json:
        table = {
            "floor": asdict(least),
            "split": [asdict(row) for row in rows],
            "messages": [asdict(message) for message in messages],
        }
        print(json.dumps(table, indent=2))
    else:
        print(show(least, rows, messages))
    return 1 if any(line.startswith("MISSED") for line in bars(rows, messages)) else 0


if __name__ == "__main__":
    sys.exit(main())
