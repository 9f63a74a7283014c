"""The longest silence of an event loop, and the memory taken, beside the worst messages of each method: legal ones at
their bounds, and illegal ones of as many bytes as a message may have. For both gRPC ports and the HTTP port.

Each process runs with a clock in its event loop (`support.clients.watched_process`). `silence` is the longest time
between two ticks, `of its own` the processor time of the loop's thread in the longest such time: on a machine with
other work the first has the others' time in it. `MiB` is what the process took at most beyond what it had before the
call; messages are up to 4 MiB of that twice, once as gRPC's buffer and once as bytes. Each call is made three times;
the median counts, since a virtual machine stands still for 15 ms once in a while.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import grpc
from support.clients.stack import EXECUTOR, MANAGER, ORACLE, ROOT
from support.clients.watched_process import WatchedProcess, running_watched
from support.clients.watched_server import Figures
from support.prompts import as_chat, as_prompt

from pagekv.client.cli.terminal import table
from pagekv.common.large_messages import MAX_TEXT_BYTES
from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.steps.v1 import executor_service_pb2 as steps_pb
from pagekv.v1 import cache_service_pb2, operator_service_pb2, types_pb2
from pagekv.v1 import inference_service_pb2 as pb

TOKENS = 2**20
MOST = MAX_RECEIVE_BYTES - 64
CONTEXT = ["--max-model-len", str(TOKENS + 4096), "--kv-memory", "16MiB"]
# Of one call: the answer, or the refusal, or what has come of a stream by then.
TIMEOUT_S = 120.0
ROUNDS = 3
# Of any call.
BAR_MS, BAR_MIB = 5, 32


def field(number: int, value: bytes) -> bytes:
    """A field that has a length."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number: int) -> bytes:
    return types_pb2.TokenIds(ids=[number]).SerializeToString()[2:]


def many(cls: Any, path: str, value: bytes = b"") -> bytes:
    """As many entries of a field as a message has room for."""
    head, _, rest = path.partition(".")
    found = cls.DESCRIPTOR.fields_by_name[head]
    if rest:
        inner: Any = type("Inner", (), {"DESCRIPTOR": found.message_type})
        return field(found.number, many(inner, rest, value))
    entry = field(found.number, value)
    return entry * ((MOST - 64) // len(entry))


def packed(cls: Any, path: str) -> bytes:
    """As many numbers in a list."""
    head, _, rest = path.partition(".")
    found = cls.DESCRIPTOR.fields_by_name[head]
    inner: Any = type("Inner", (), {"DESCRIPTOR": found.message_type})
    return field(found.number, packed(inner, rest) if rest else bytes(MOST - 64))


IDS = as_prompt([n % 4000 for n in range(TOKENS)])
SHORTER = as_prompt([n * 7 % 4000 for n in range(2**17)])
LONG_CHAT = as_chat(*[("user", "word " * 20)] * 4096)
TEXT = as_prompt("ab c" * (MAX_TEXT_BYTES // 4))
INFERENCE, CACHE, OPERATOR = (f"pagekv.v1.{name}Service" for name in ("Inference", "Cache", "Operator"))
GATEWAY = "vllm.grpc.engine.VllmEngine"


def manager_calls() -> Iterator[tuple[str, str, bytes]]:
    """Name, method and message."""
    sampling = types_pb2.SamplingParams(max_tokens=1, temperature=0.0)
    yield "Abort: 2 M empty ids", f"{INFERENCE}/Abort", many(pb.AbortRequest, "request_ids")
    ids = pb.AbortRequest(request_ids=["x" * 124 + f"{n:04}" for n in range(1024)])
    yield "Abort: 1,024 ids", f"{INFERENCE}/Abort", ids.SerializeToString()
    for path in ("sampling_params.stop", "sampling_params.logit_bias", "prompt.chat.messages", "cache.media_hashes"):
        yield f"Generate: {path}, millions", f"{INFERENCE}/Generate", many(pb.GenerateRequest, path)
    for path in ("prompt.token_ids.ids", "sampling_params.stop_token_ids", "resumed_token_ids"):
        yield f"Generate: {path}, 4 M", f"{INFERENCE}/Generate", packed(pb.GenerateRequest, path)
    yield "Generate: no message", f"{INFERENCE}/Generate", b"\xff" * MOST
    for name, prompt in (
        ("128 Ki token ids", SHORTER),
        ("1 M token ids", IDS),
        ("4,096 messages", LONG_CHAT),
        ("4 MB of text", TEXT),
    ):
        request = pb.GenerateRequest(prompt=prompt, sampling_params=sampling)
        yield f"Generate: {name}", f"{INFERENCE}/Generate", request.SerializeToString()
        yield (
            f"Tokenize: {name}",
            f"{INFERENCE}/Tokenize",
            pb.TokenizeRequest(prompt=prompt).SerializeToString(),
        )
    tokens = pb.DetokenizeRequest(token_ids=IDS.token_ids.ids)
    yield "Detokenize: 1 M token ids", f"{INFERENCE}/Detokenize", tokens.SerializeToString()
    yield "Detokenize: 4 M token ids", f"{INFERENCE}/Detokenize", packed(pb.DetokenizeRequest, "token_ids")
    for name in ("LookupPrefix", "ExplainPrefix", "PinPrefix"):
        more: dict[str, Any] = {"ExplainPrefix": {"page_size": 4096}, "PinPrefix": {"lease_seconds": 1}}.get(name, {})
        request = getattr(cache_service_pb2, f"{name}Request")(prompt=IDS, **more)
        yield f"{name}: 1 M token ids", f"{CACHE}/{name}", request.SerializeToString()
        yield f"{name}: no message", f"{CACHE}/{name}", b"\xff" * MOST
    yield "UnpinPrefix: 4 MiB", f"{CACHE}/UnpinPrefix", field(1, b"x" * (MOST - 8))
    for name, message in (
        ("ListBlocks", operator_service_pb2.ListBlocksRequest(page_size=4096)),
        ("ListRequests", operator_service_pb2.ListRequestsRequest(page_size=4096)),
        ("GetStats", operator_service_pb2.GetStatsRequest()),
    ):
        yield f"{name}: the largest page", f"{OPERATOR}/{name}", message.SerializeToString()
    yield "GetBlockTable: 4 MiB", f"{OPERATOR}/GetBlockTable", field(1, b"x" * (MOST - 8))
    with suppress(ImportError):
        from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

        yield "gateway's Abort, millions", f"{GATEWAY}/Abort", many(vllm.AbortRequest, "request_ids")
        for path in ("sampling_params.stop", "sampling_params.logit_bias"):
            yield f"gateway's Generate: {path}, millions", f"{GATEWAY}/Generate", many(vllm.GenerateRequest, path)
        yield (
            "gateway's Generate: 4 M token ids",
            f"{GATEWAY}/Generate",
            packed(vllm.GenerateRequest, "tokenized.input_ids"),
        )


def executor_calls() -> Iterator[tuple[str, str, bytes]]:
    service = "pagekv.steps.v1.ExecutorService"
    yield "Attach: 4 M features", f"{service}/Attach", packed(steps_pb.AttachRequest, "required_features")
    yield "Describe: no message", f"{service}/Describe", b"\xff" * MOST
    long = steps_pb.NewSequence(seq_id=1, token_ids=[300] * (2**20 - 64)).SerializeToString()
    yield "Run: a stale step", f"{service}/Run", b"\x08\x01" + field(5, long)
    yield "Run: a step of 200 MiB", f"{service}/Run", b"\x08\x01" + field(5, long) * 100
    yield "Run: 2 M stale sequences", f"{service}/Run", b"\x08\x01" + many(steps_pb.StepRequest, "new_seqs")
    yield "Run: 2 M sequences, epoch last", f"{service}/Run", many(steps_pb.StepRequest, "new_seqs") + b"\x08\x01"


BODIES = {
    "explain: 64 KiB of numbers": b'{"token_ids": [' + b"0," * 32_750 + b"0]}",
    "explain: 64 KiB of objects": b"[" + b"{}," * 21_800 + b"{}]",
    "explain: 4 MiB": b" " * 4 * 2**20,
}


async def call(channel: Any, method: str, message: bytes) -> str:
    """The status."""
    try:
        if method.endswith("/Run"):
            async for _ in channel.stream_stream(f"/{method}")(iter([message]), timeout=TIMEOUT_S):
                break
        elif method.endswith("/Generate"):
            async for _ in channel.unary_stream(f"/{method}")(message, timeout=TIMEOUT_S):
                pass
        else:
            await channel.unary_unary(f"/{method}")(message, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


Row = tuple[str, str, str, float, float, float]


async def measure(server: WatchedProcess, calls: list[tuple[str, str, bytes]]) -> list[Row]:
    """One round: name, MiB, answer; milliseconds of silence, those of its own; MiB taken."""
    rows: list[Row] = []
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.target, options=options) as channel:
        for name, method, message in calls:
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.figures)
            status = await call(channel, method, message)
            rows.append(_row(name, message, status, await asyncio.to_thread(server.figures)))
    if server.http:
        async with aiohttp.ClientSession() as session:
            for name, body in BODIES.items():
                await asyncio.to_thread(server.figures)
                async with session.post(f"http://{server.http}/api/explain", data=body) as response:
                    status = str(response.status)
                rows.append(_row(name, body, status, await asyncio.to_thread(server.figures)))
    return rows


def _row(name: str, message: bytes, status: str, figures: Figures) -> Row:
    taken = figures.taken_bytes / 2**20
    return name, f"{len(message) / 2**20:.1f}", status, 1e3 * figures.silence_s, 1e3 * figures.own_s, taken


def show(server: WatchedProcess, calls: list[tuple[str, str, bytes]]) -> None:
    """Prints the medians of the rounds, the longest silence of each call, and the calls beyond the bar."""
    rounds = [asyncio.run(measure(server, calls)) for _ in range(ROUNDS)]
    rows, beyond = [], []
    for same in zip(*rounds, strict=True):
        name, size, status = same[0][:3]
        silences, own, taken = zip(*(row[3:] for row in same), strict=True)
        rows.append((name, size, status, *(f"{median(of):.1f}" for of in (silences, own)), f"{max(silences):.1f}",
                     f"{max(taken):.0f}"))  # fmt: skip  # the columns of one row
        if median(silences) > BAR_MS or max(taken) > float(size) + BAR_MIB:
            beyond.append(name)
    print(table(rows, ("message", "MiB", "answer", "silence ms", "of its own", "at most", "MiB taken")))
    bar = f"{BAR_MS} ms of silence and {BAR_MIB} MiB beyond the message itself"
    print(f"beyond {bar}: {', '.join(beyond) or 'none'}\n")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "build" if (ROOT / "build").is_dir() else None) as temporary:
        directory = Path(temporary)
        with running_watched(EXECUTOR, [*ORACLE, *CONTEXT], directory) as executor:
            args = ["--executor", executor.target, "--http-listen", "127.0.0.1:0"]
            with suppress(ImportError):
                import smg_grpc_proto  # noqa: F401 - whether it is installed

                args.append("--gateway-api")
            with running_watched(MANAGER, args, directory) as manager:
                time.sleep(3)  # the manager attaches
                show(manager, list(manager_calls()))
            show(executor, list(executor_calls()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
