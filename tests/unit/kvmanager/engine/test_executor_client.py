"""The link to an executor on a real socket."""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from support.clients.certificates import Authority, client_credentials
from support.engine.fake_engine import MODEL
from support.engine.replaced_status import OF_THE_WRITE, SENT, ReplacedStatus
from support.event_loop import in_event_loop

from pagekv.common.errors import InvalidRequest, LimitExceeded, PageKVError, StaleEpoch, Unavailable
from pagekv.common.statuses import abort_with
from pagekv.kvmanager.engine import executor_client
from pagekv.kvmanager.engine.executor_client import AttachRefused, ExecutorLink, ExecutorLost, NoExecutor, NoRoom
from pagekv.kvmanager.engine.recovery import Fault
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import NewSeq, StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc


class _Executor(pb_grpc.ExecutorServiceServicer):
    """Ends every stream of steps as it is told."""

    def __init__(self, end: Exception | grpc.StatusCode) -> None:
        self._end = end
        self.revision = self.epoch = 1
        self.described = pb.DescribeRequest()
        self.attached = pb.AttachRequest()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        self.described = request
        return pb.DescribeResponse(contract_revision=self.revision)

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        self.attached = request
        return pb.AttachResponse(epoch=self.epoch)

    async def Run(self, request_iterator: AsyncIterator[pb.StepRequest], context: Any) -> AsyncIterator[pb.StepResult]:
        if isinstance(self._end, PageKVError):
            await abort_with(context, self._end)
        elif isinstance(self._end, Exception):
            raise self._end
        elif self._end is not grpc.StatusCode.OK:
            await context.abort(self._end, "words")
        return
        yield pb.StepResult()


@asynccontextmanager
async def _link(executor: _Executor, wake: Callable[[], None] = lambda: None) -> AsyncIterator[ExecutorLink]:
    server = grpc.aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(executor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = ExecutorLink(f"127.0.0.1:{port}", wake)
    try:
        yield link
    finally:
        await link.close()
        await server.stop(None)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("127.0.0.1:1", "nothing listens at 127.0.0.1:1, .*: start a pagekv-executor with --listen 127.0.0.1:1, or "),
        (
            "unix:/nowhere/x",
            "nothing listens at unix:/nowhere/x, .*: start a pagekv-executor with --listen unix:/no",
        ),
        ("nobody.invalid:5", "no address is known for the name in nobody.invalid:5: check its spelling, or name "),
    ],
)
def test_an_address_where_nothing_answers(target: str, words: str) -> None:
    async def main() -> None:
        link = ExecutorLink(target, lambda: None)
        try:
            await link.describe(16, 512)
        finally:
            await link.close()

    with pytest.raises(NoExecutor, match=words):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no TLS here", "closes every connection at once: it wants TLS .--executor-ca., or"),
        ("no TLS there", "answers without TLS: give it --tls-cert, or leave --executor-ca out"),
        ("shows nothing", "closes every connection at once: it wants TLS .* --tls-client-ca .--executor-cert, else"),
        ("another authority", "is not signed by an authority in --executor-ca"),
        ("an authority of the same name", "is not signed by an authority in --executor-ca"),
        ("expired", "or that of its authority, has expired .*: renew it, or set the clock"),
        ("early", "or is not valid yet by this machine's clock: renew it, or set the clock"),
        ("another name", "is not for this name: name it with --executor as its certificate does"),
    ],
)
@in_event_loop
async def test_a_refused_handshake_says_what_to_do(case: str, words: str, tmp_path: Path) -> None:
    signer = Authority(tmp_path)
    (tmp_path / "other").mkdir()
    same_name, stranger = Authority(tmp_path / "other"), Authority(tmp_path, "stranger")
    ends = timedelta(days=-1 if case == "expired" else 30)
    since = timedelta(days=1 if case == "early" else -3)
    pair, own = signer.pair("executor", since=since, until=ends), signer.pair("manager")
    server = grpc.aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(_Executor(grpc.StatusCode.OK), server)
    shown = [(pair.key_pem, pair.pem)]
    # Not localhost, for which gRPC also tries ::1, where nothing listens.
    host = "127.0.0.2" if case == "another name" else "127.0.0.1"
    port = (
        server.add_insecure_port(f"{host}:0")
        if case == "no TLS there"
        else server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials(shown, signer.ca.read_bytes(), True))
    )
    await server.start()
    trusted = {"another authority": stranger, "an authority of the same name": same_name}.get(case, signer)
    credentials = client_credentials(trusted.ca, None if case == "shows nothing" else own)
    link = ExecutorLink(f"{host}:{port}", lambda: None, None if case == "no TLS here" else credentials)
    with pytest.raises(NoExecutor, match=words):
        await link.describe(16, 512)
    await link.close()
    await server.stop(None)


@in_event_loop
async def test_the_name_of_an_executor_behind_a_unix_socket_is_localhost(tmp_path: Path) -> None:
    signer, server = Authority(tmp_path), grpc.aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(_Executor(grpc.StatusCode.OK), server)
    pair = signer.pair("executor")
    with tempfile.TemporaryDirectory() as short:
        target = f"unix:{short}/executor"
        server.add_secure_port(target, grpc.ssl_server_credentials([(pair.key_pem, pair.pem)]))
        await server.start()
        link = ExecutorLink(target, lambda: None, client_credentials(signer.ca))
        await link.describe(16, 512)
        await link.close()
        await server.stop(None)


@in_event_loop
async def test_a_server_that_does_not_speak_grpc() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = ExecutorLink(f"127.0.0.1:{port}", lambda: None)
    with pytest.raises(NoExecutor, match=rf"127.0.0.1:{port} does not speak gRPC: name the executor's address"):
        await link.describe(16, 16)
    await link.close()
    server.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, AttachRefused),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NoRoom),
        (grpc.StatusCode.FAILED_PRECONDITION, ExecutorLost),
        (grpc.StatusCode.INTERNAL, ExecutorLost),
    ],
)
def test_refusals_by_what_another_attempt_would_help(code: grpc.StatusCode, kind: type[Exception]) -> None:
    class Unwilling(_Executor):
        async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
            await context.abort(code, "lower --kv-memory")
            raise AssertionError

    async def main() -> None:
        async with _link(Unwilling(grpc.StatusCode.OK)) as link:
            await link.attach("m", MODEL, "", take_over=False)

    with pytest.raises(kind, match=f"Attach: {code.name}: lower --kv-memory") as caught:
        asyncio.run(main())
    assert type(caught.value) is kind
    if isinstance(caught.value, NoRoom):
        assert caught.value.asked == (MODEL.num_device_blocks, MODEL.num_host_blocks)


# By code of a status without details; of all others the step is at fault.
FAULTS = {
    grpc.StatusCode.ABORTED: Fault.NONE,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.NONE,
    grpc.StatusCode.UNAVAILABLE: Fault.GONE,
    grpc.StatusCode.CANCELLED: Fault.GONE,
}


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        *((code, FAULTS.get(code, Fault.STEP)) for code in grpc.StatusCode),
        (RuntimeError("whatever the model said"), Fault.STEP),
        (InvalidRequest("step", "must be 1"), Fault.STEP),
        (LimitExceeded("no memory is left"), Fault.STEP),
        (Unavailable("the executor is shutting down"), Fault.NONE),
        (StaleEpoch("taken over"), Fault.NONE),
    ],
    ids=str,
)
@in_event_loop
async def test_what_ends_the_stream_says_whose_fault_it_was(end: Exception | grpc.StatusCode, fault: Fault) -> None:
    woken = asyncio.Event()
    async with _link(_Executor(end), woken.set) as link:
        await link.attach("m", MODEL, "any", False)
        await woken.wait()
        with pytest.raises(ExecutorLost) as lost:
            link.take_result()
    assert lost.value.fault is fault


@in_event_loop
async def test_a_failed_write_does_not_blame_the_step_for_a_take_over() -> None:
    link, call = ExecutorLink("localhost:1", lambda: None), ReplacedStatus()
    reading = asyncio.create_task(link._read(cast("Any", call)))
    await asyncio.sleep(0)
    call.set(SENT)
    call.set(OF_THE_WRITE)
    await reading
    with pytest.raises(ExecutorLost, match="Run: ABORTED: taken over") as lost:
        link.take_result()
    assert lost.value.fault is Fault.NONE
    await link.close()


def test_a_defect_in_reading_a_result_ends_the_stream_with_its_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: pb.StepResult) -> StepResult:
        raise KeyError(f"of step {message.step}")

    class Answers(_Executor):
        async def Run(self, request_iterator: AsyncIterator[pb.StepRequest], context: Any) -> Any:
            yield pb.StepResult(epoch=self.epoch, step=3)
            await asyncio.Event().wait()

    async def main() -> None:
        woken = asyncio.Event()
        async with _link(Answers(grpc.StatusCode.OK), woken.set) as link:
            await link.attach("m", MODEL, "any", False)
            await woken.wait()
            with pytest.raises(ExecutorLost, match="KeyError while a result was read") as lost:
                link.take_result()
        assert lost.value.fault is Fault.STEP

    monkeypatch.setattr(executor_client, "step_result", broken)
    asyncio.run(asyncio.wait_for(main(), 120))
    assert "KeyError: 'of step 3'" in caplog.text


@pytest.mark.parametrize("revision", [1, 7])
@in_event_loop
async def test_revision_and_features_are_agreed_upon(revision: int) -> None:
    """The earlier of both revisions, and the features that the model's epoch uses."""
    executor = _Executor(grpc.StatusCode.UNAVAILABLE)
    executor.revision = revision
    model = replace(MODEL, features=("logprobs", "penalties"))
    async with _link(executor) as link:
        await link.describe(16, 32)
        await link.attach("m", model, "any", True)
    assert executor.described == pb.DescribeRequest(block_size=16, token_budget=32, contract_revision=1)
    assert executor.attached == pb.AttachRequest(
        manager_id="m",
        block_size=model.block_size,
        num_device_blocks=model.num_device_blocks,
        layout="any",
        take_over=True,
        required_features=[pb.EXECUTOR_FEATURE_LOGPROBS, pb.EXECUTOR_FEATURE_PENALTIES],
        contract_revision=1,
    )


@in_event_loop
async def test_an_epoch_that_is_none_is_not_believed() -> None:
    executor = _Executor(grpc.StatusCode.UNAVAILABLE)
    executor.epoch = 0
    async with _link(executor) as link:
        with pytest.raises(ExecutorLost, match=r"AttachResponse\.epoch: must not be 0"):
            await link.attach("m", MODEL, "any", False)


@in_event_loop
async def test_the_link_to_the_executor_takes_no_detour_over_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = ExecutorLink(f"127.0.0.1:{port}", lambda: None)
    with pytest.raises(
        NoExecutor, match=rf"127.0.0.1:{port} is no executor, or .*\(.*UNIMPLEMENTED.*: name the executor's"
    ):
        await link.describe(16, 16)
    await link.close()
    await server.stop(None)


@pytest.mark.parametrize("packed", [b"", b"x"])
@in_event_loop
async def test_the_message_of_a_long_prompt_is_made_in_a_turn_of_its_own(
    monkeypatch: pytest.MonkeyPatch, packed: bytes
) -> None:
    """Others run between the plan of its step, which took a share of the turn, and the message; not for other steps."""
    made: list[StepPlan] = []

    class Call:
        async def write(self, data: bytes) -> None:
            made.append(plan)

    def step_bytes(plan: StepPlan, *others: object) -> bytes:
        made.append(plan)
        return b""

    request = SimpleNamespace(packed_prompt=packed)
    new = NewSeq(cast("Seq", SimpleNamespace(request=request)), 1, array("I"), array("i"), 0)
    plan = StepPlan(new=[new])
    link = ExecutorLink("localhost:1", lambda: None)
    link._call = cast("Any", Call())
    monkeypatch.setattr(executor_client, "step_bytes", step_bytes)
    sending = asyncio.create_task(link.send(plan, 5))
    await asyncio.sleep(0)
    assert len(made) == (0 if packed else 2)
    await sending
    assert made == [plan, plan]
    link._call = None
    await link.close()
