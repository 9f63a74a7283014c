"""Client streams for benchmarks, in a process of their own: as many Generate calls as asked for, read with libcurl.

gRPC for Python takes 50 microseconds of CPU to read a message, as much as the manager has to make and write it: on two
cores such clients would be half of what is measured. libcurl takes a fraction. It reads every millisecond, so that
what the clients take grows with time and hardly with messages; gaps between messages are as exact as that.

Speaks lines: prints "ready" once every stream has had a message; "begin" on standard input opens the window that is
measured, "end" closes it, ends the streams and makes it print one line of JSON (`Report`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import asdict, dataclass

import pycurl

from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

GENERATE = "/pagekv.v1.InferenceService/Generate"
PROMPT_TOKENS = 16
# More than any window lasts; the streams are ended by their readers.
MAX_TOKENS = 30_000
READ_EVERY_S = 0.001
START_TIMEOUT_S = 120
# Of gRPC over HTTP/2: a byte that says "not compressed", and the length of the message.
PREFIX = struct.Struct(">BI")


@dataclass(frozen=True, slots=True)
class Order:
    """The load."""

    target: str
    streams: int
    seed: int = 0
    # Paths of PEM files for mutual TLS, and the keys that streams show in turns; empty for none.
    ca: str = ""
    cert: str = ""
    key: str = ""
    bearers: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """Observations of the streams within the window."""

    messages: int
    # Of the stream with the fewest.
    fewest: int
    # Milliseconds between messages of one stream: median, 99th percentile, most.
    gap_p50: float
    gap_p99: float
    gap_max: float
    # CPU seconds of this process.
    cpu_s: float


def request(seed: int, number: int) -> bytes:
    """A prompt of its own, so that no two sequences share blocks."""
    chance = random.Random(f"{seed} {number}")
    ids = [chance.randrange(10, 500) for _ in range(PROMPT_TOKENS)]
    return pb.GenerateRequest(
        prompt=types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=ids)),
        sampling_params=types_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
    ).SerializeToString()


class Load:
    """All streams of one order, multiplexed on one connection."""

    def __init__(self, order: Order) -> None:
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_PIPELINING, pycurl.PIPE_MULTIPLEX)
        self._multi.setopt(pycurl.M_MAX_CONCURRENT_STREAMS, 4096)
        # When each stream's messages came, perf_counter seconds.
        self._arrivals: list[list[float]] = [[] for _ in range(order.streams)]
        self._calls = [
            _call(order, number, request(order.seed, number), arrivals)
            for number, arrivals in enumerate(self._arrivals)
        ]
        for call in self._calls:
            self._multi.add_handle(call)

    def run(self) -> Report:
        """From the first call to the report."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(self._arrivals):
            self._read()
            if time.monotonic() > deadline:
                silent = sum(not arrivals for arrivals in self._arrivals)
                print(f"{silent} streams had no message within {START_TIMEOUT_S} s", file=sys.stderr)
                os._exit(1)
        print("ready", flush=True)
        self._read_until("begin")
        begin, cpu = time.perf_counter(), time.process_time()
        self._read_until("end")
        report = self._report(begin, time.perf_counter(), time.process_time() - cpu)
        for call in self._calls:
            self._multi.remove_handle(call)
            call.close()
        return report

    def _read_until(self, word: str) -> None:
        """Reads until this word comes; ends the process when anything else does, as the benchmark is gone then."""
        while True:
            self._read()
            if select.select([sys.stdin], [], [], 0)[0]:
                break
        if sys.stdin.readline().strip() != word:
            os._exit(2)

    def _read(self) -> None:
        self._multi.perform()
        _, ended, failed = self._multi.info_read()
        if ended or failed:
            print(f"a stream ended early: {failed[0][2] if failed else 'without an error'}", file=sys.stderr)
            os._exit(1)
        time.sleep(READ_EVERY_S)

    def _report(self, begin: float, end: float, cpu_s: float) -> Report:
        within = [[now for now in arrivals if begin <= now <= end] for arrivals in self._arrivals]
        gaps = sorted(
            1000 * (later - sooner) for arrivals in within for sooner, later in itertools.pairwise(arrivals)
        ) or [0.0]
        counts = [len(arrivals) for arrivals in within]
        return Report(
            messages=sum(counts),
            fewest=min(counts, default=0),
            gap_p50=gaps[len(gaps) // 2],
            gap_p99=gaps[len(gaps) * 99 // 100],
            gap_max=gaps[-1],
            cpu_s=cpu_s,
        )


def _call(order: Order, number: int, message: bytes, arrivals: list[float]) -> pycurl.Curl:
    """A Generate call that notes when its messages come."""
    call = pycurl.Curl()
    call.setopt(pycurl.URL, f"http{'s' if order.ca else ''}://{order.target}{GENERATE}")
    call.setopt(pycurl.PROXY, "")
    call.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_2_PRIOR_KNOWLEDGE)
    headers = ["content-type: application/grpc", "te: trailers", "expect:"]
    if order.ca:
        call.setopt(pycurl.CAINFO, order.ca)
        call.setopt(pycurl.SSLCERT, order.cert)
        call.setopt(pycurl.SSLKEY, order.key)
        headers.append(f"authorization: Bearer {order.bearers[number % len(order.bearers)]}")
    # Waits for the connection that there is instead of opening another.
    call.setopt(pycurl.PIPEWAIT, 1)
    call.setopt(pycurl.HTTPHEADER, headers)
    call.setopt(pycurl.POSTFIELDS, PREFIX.pack(0, len(message)) + message)
    held = bytearray()

    def write(data: bytes) -> None:
        held.extend(data)
        while len(held) >= PREFIX.size:
            size = PREFIX.size + PREFIX.unpack_from(held)[1]
            if len(held) < size:
                break
            del held[:size]
            arrivals.append(time.perf_counter())

    call.setopt(pycurl.WRITEFUNCTION, write)
    return call


if __name__ == "__main__":
    print(json.dumps(asdict(Load(Order(**json.loads(sys.argv[1]))).run())), flush=True)
