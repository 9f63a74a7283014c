"""The real executor process with the oracle: it starts fast, without torch, and ends in order."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.stack import Process, environment
from support.waiting import wait_until

from pagekv.common.port_file import read_port_file, write_port_file
from pagekv.executor import server
from pagekv.executor.backend.interface import LAYOUT, Backend
from pagekv.executor.config import parse_config
from pagekv.executor.ranks.watch import EXIT_LOST
from pagekv.executor.world import ALONE, World
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

pytestmark = pytest.mark.e2e

# A start takes 0.3 to 0.6 s; the bound only keeps a test of a process that hangs from lasting for ever.
START_BOUND_S = 600.0


def execute(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@contextmanager
def executing(code: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this text, for as long as the context lasts."""
    command = [sys.executable, "-c", code]
    popen = subprocess.Popen(command, env=env or environment(), stderr=subprocess.PIPE, text=True)
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


def wait_for(condition: Callable[[], object]) -> None:
    wait_until(condition, START_BOUND_S)


def wait_until_serving(channel: grpc.Channel) -> None:
    health, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    wait_for(lambda: health.Check(request).status == health_pb2.HealthCheckResponse.SERVING)


def attach_request(num_device_blocks: int) -> pb.AttachRequest:
    return pb.AttachRequest(
        manager_id="test",
        block_size=16,
        num_device_blocks=num_device_blocks,
        layout=LAYOUT,
        contract_revision=1,
    )


def steps(epoch: int, count: int) -> Iterator[pb.StepRequest]:
    """A sequence enters and decodes until `count` steps are sent."""
    sampling = pb.StepSampling(top_p=1.0, repetition_penalty=1.0)
    new = pb.NewSequence(seq_id=1, token_ids=[5], num_prompt_tokens=1, block_ids=range(20), sampling=sampling)
    yield pb.StepRequest(epoch=epoch, step=1, new_seqs=[new])
    for step in range(2, count + 1):
        yield pb.StepRequest(epoch=epoch, step=step)


def test_sigterm_finishes_the_step_under_way_and_exits_0(tmp_path: Path) -> None:
    port_file, begun = tmp_path / "port", tmp_path / "begun"
    begun.touch()
    code = (
        "import os, sys, time; from pagekv.executor import choose_backend, server\n"
        "from pagekv.executor.oracle.backend import OracleBackend, OracleModel\n"
        f"begun = os.open({str(begun)!r}, os.O_WRONLY | os.O_APPEND)\n"
        "sleep = lambda seconds: (os.write(begun, b'.'), time.sleep(seconds))\n"
        "choose_backend.load_backend = lambda config: OracleBackend(OracleModel(), step_time_s=0.2, sleep=sleep)\n"
        f"sys.exit(server.main(['--backend', 'oracle', '--listen', '127.0.0.1:0', '--port-file', {str(port_file)!r}]))"
    )
    with executing(code) as popen:
        wait_for(port_file.exists)
        with grpc.insecure_channel(read_port_file(port_file)["listen"]) as channel:
            wait_until_serving(channel)
            stub = pb_grpc.ExecutorServiceStub(channel)
            epoch = stub.Attach(attach_request(32)).epoch
            assert epoch > time.time_ns() - 10**12
            call = stub.Run(steps(epoch, 300))
            assert next(call).step == 1
            wait_for(lambda: begun.stat().st_size > 1)
            popen.send_signal(signal.SIGTERM)
            seen: list[int] = []
            with pytest.raises(grpc.RpcError) as caught:
                seen.extend(result.step for result in call)
            assert cast("grpc.Call", caught.value).code() is grpc.StatusCode.UNAVAILABLE
            assert seen[0] == 2
            assert seen[-1] < 300  # the step under way was reported, those behind it were not run
        _, log = popen.communicate(timeout=START_BOUND_S)
        assert popen.returncode == 0, log
        assert "stopped" in log.splitlines()[-1]


def test_health_and_reflection_name_the_service(tmp_path: Path) -> None:
    process = Process("pagekv.executor", ["--backend", "oracle", "--model", "demo"], tmp_path)
    process.start()
    try:
        process.wait_serving()
        with grpc.insecure_channel(process.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "pagekv.steps.v1.ExecutorService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=120)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            described = pb_grpc.ExecutorServiceStub(channel).Describe(pb.DescribeRequest(block_size=16, token_budget=1))
            assert (described.model_id, described.backend) == ("demo", "oracle")
        assert process.stop() == 0
    finally:
        if process.popen is not None and process.popen.poll() is None:
            process.kill()


def test_a_step_may_have_4_mib(tmp_path: Path) -> None:
    """A longer one ends the epoch."""
    length, count, token = 2**17, 6, 2**30  # an id of five bytes on the wire
    args = ["--backend", "oracle", "--max-model-len", str(length), "--vocab-size", str(2**31 - 1)]
    process = Process("pagekv.executor", args, tmp_path)
    process.start()
    try:
        process.wait_serving()
        with grpc.insecure_channel(process.target, [("grpc.max_send_message_length", -1)]) as channel:
            stub = pb_grpc.ExecutorServiceStub(channel)
            request = attach_request(count)
            sampling = pb.StepSampling(top_p=1.0, repetition_penalty=1.0)
            new = pb.NewSequence(token_ids=[token] * length, num_prompt_tokens=1, sampling=sampling)
            step = pb.StepRequest(epoch=stub.Attach(request).epoch, step=1)
            for seq_id in range(count):
                new.seq_id = seq_id
                new.block_ids[:] = [seq_id]
                step.new_seqs.append(new)
            assert 0.9 * 2**22 < step.ByteSize() < 2**22
            assert next(stub.Run(iter([step]))).computed_tokens == count
            step.new_seqs.append(new)
            with pytest.raises(grpc.RpcError, match=r"larger than max .* vs\. 4194304"):
                next(stub.Run(iter([step])))
        assert process.stop() == 0
    finally:
        if process.popen is not None and process.popen.poll() is None:
            process.kill()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_ends_without_the_interpreter(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of gloo and NCCL abort that, or keep it from ending."""

    class Ended(Exception):
        """Instead of the end of this process."""

    def end(status: int) -> None:
        raise Ended(status)

    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(server, "_run", lambda *_: 7)
    monkeypatch.setattr(server, "_follow", lambda *_: 7)
    monkeypatch.setattr("os._exit", end)
    # Of the tests' own logs.
    monkeypatch.setattr("logging.shutdown", lambda: None)
    with pytest.raises(Ended, match="7"):
        server.main(["--backend", "oracle"])


@pytest.mark.parametrize(("world", "status"), [(World(0, 2, 2), EXIT_LOST), (ALONE, 7)])
def test_a_rank_whose_device_is_lost_ends_to_be_started_anew_by_torchrun(
    world: World, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process starts anew by itself."""

    async def run(executor: server.Executor, stop: asyncio.Event) -> int:
        executor.session.lost_reason = "a collective failed"
        return 0

    async def start_anew(*_: object) -> int:
        return 7

    def load() -> Backend:
        raise AssertionError("it is never loaded")

    monkeypatch.setattr(server.Executor, "run", run)
    monkeypatch.setattr(server, "start_anew", start_anew)
    assert asyncio.run(server.serve(parse_config(["--backend", "oracle"], {}), load, world)) == status


@pytest.mark.parametrize(("flag", "status", "asked"), [("--no-such-flag", 2, 1), ("--version", 0, 0)])
def test_flags_that_no_start_can_have_end_the_start_of_all_ranks(
    flag: str, status: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun would start them for ever."""
    ended: list[World] = []
    monkeypatch.setattr(server, "end_torchrun", ended.append)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=str(status)):
        server.main([flag])
    assert [world.size for world in ended] == [2] * asked


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "/nowhere"], "--model cannot be used"),
        (["--vocab-size", "5", "--eos", "5"], "must be below the vocabulary size 5"),
        (
            ["--listen", "203.0.113.1:1", "--insecure"],
            "cannot listen on 203.0.113.1:1: this machine does not have that address",
        ),
    ],
)
def test_a_start_that_cannot_succeed_says_why_in_one_line(argv: list[str], words: str) -> None:
    listen = [] if "--listen" in argv else ["--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "pagekv.executor.server", "--backend", "oracle", *listen, *argv]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_one_that_cannot_listen_tells_so_in_its_port_file_and_nothing_of_one_before(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    write_port_file(port_file, {"listen": "127.0.0.1:1"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--backend", "oracle", "--listen", address, "--port-file", str(port_file)]
        done = execute(f"import sys; from pagekv.executor.server import main; sys.exit(main({flags!r}))")
    assert done.returncode == 1, done.stderr
    told = read_port_file(port_file)
    assert told.keys() == {"cannot_start"}
    assert told["cannot_start"].startswith(f"cannot listen on {address}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "{empty}"], "is empty: it should hold a model's config.json"),
        (["--model", "{config}"], "has no weights"),
        (["--dtype", "float16"], "--dtype float16: must be one of"),
        (["--kv-memory", "1"], "--kv-memory 1: must hold a block of 16 tokens"),
        (["--kv-dtype", "fp8"], "--kv-dtype fp8 needs --backend cuda"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_found_before_torch_is_imported_and_told_in_the_port_file(
    tmp_path: Path, argv: list[str], words: str
) -> None:
    places = {"empty": tmp_path / "empty", "config": tmp_path / "config"}
    for path in places.values():
        path.mkdir()
    (places["config"] / "config.json").write_text("{}")
    port_file = tmp_path / "port"
    flags = ["--backend", "cpu", "--listen", "127.0.0.1:0", "--port-file", str(port_file)]
    flags += [word.format(**places) for word in argv]
    done = execute(
        f"import sys; from pagekv.executor.server import main; status = main({flags!r})\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys())); sys.exit(status)"
    )
    assert (done.returncode, done.stdout.strip()) == (1, "[]"), done.stderr
    assert words in done.stderr
    assert words in read_port_file(port_file)["cannot_start"]
    assert "Errno" not in done.stderr


def test_a_port_open_to_others_is_refused_before_torch_is_imported_and_warned_of_where_it_is_accepted() -> None:
    code = (
        "import sys; from pagekv.executor.server import main\n"
        "try: main({argv})\n"
        "finally: print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    )
    # Behind the port comes an error, with which the process ends by itself.
    flags = ["--backend", "oracle", "--listen", "0.0.0.0:0", "--vocab-size", "5", "--eos", "5"]
    done = execute(code.format(argv=flags))
    assert (done.returncode, done.stdout.strip()) == (2, "[]"), done.stderr
    assert "other machines could connect to 0.0.0.0:0" in done.stderr
    done = execute(code.format(argv=[*flags, "--insecure"]))
    assert "other machines can connect, without TLS or a login (--insecure) listen=0.0.0.0:0" in done.stderr


def test_a_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['pagekv.executor.cpu'] = None\n"
        "from pagekv.executor.server import main; sys.exit(main(['--listen', '127.0.0.1:0']))"
    )
    done = execute(code)
    assert done.returncode == 1
    assert "pip install 'pagekv[executor]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_while_loading_and_answers_until_loaded(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    code = (
        "import sys, time; from pagekv.executor import choose_backend, server\n"
        "choose_backend.load_backend = lambda config: time.sleep(60)\n"
        f"sys.exit(server.main(['--backend', 'oracle', '--listen', '127.0.0.1:0', '--port-file', {str(port_file)!r}]))"
    )
    with executing(code) as popen:
        wait_for(port_file.exists)
        with grpc.insecure_channel(read_port_file(port_file)["listen"]) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError, match="still loading its model"):
                pb_grpc.ExecutorServiceStub(channel).Describe(pb.DescribeRequest(block_size=16, token_budget=1))
        popen.send_signal(signal.SIGTERM)
        _, log = popen.communicate(timeout=START_BOUND_S)
        assert popen.returncode == 0, log
        assert "loading the model" in log


def test_a_backend_of_somebody_elses_is_served(tmp_path: Path) -> None:
    """It is made on the thread that calls it."""
    port_file = tmp_path / "port"
    code = (
        "import sys, threading; from pagekv.executor.oracle.backend import OracleBackend, OracleModel\n"
        "from pagekv.executor.server import serve_backend\n"
        "class Mine(OracleBackend):\n"
        "    def __init__(self):\n"
        "        super().__init__(OracleModel())\n"
        "        self.made_on = threading.get_ident()\n"
        "    def describe(self, *args):\n"
        "        assert threading.get_ident() == self.made_on != threading.main_thread().ident\n"
        "        return super().describe(*args)\n"
        "sys.exit(serve_backend(Mine, '127.0.0.1:0'))"
    )
    env = {**environment(), "PAGEKV_PORT_FILE": str(port_file)}
    with executing(code, env) as popen:
        wait_for(port_file.exists)
        with grpc.insecure_channel(read_port_file(port_file)["listen"]) as channel:
            wait_until_serving(channel)
            stub = pb_grpc.ExecutorServiceStub(channel)
            assert stub.Describe(pb.DescribeRequest(block_size=16, token_budget=1)).backend == "oracle"
        popen.send_signal(signal.SIGTERM)
        _, log = popen.communicate(timeout=START_BOUND_S)
        assert popen.returncode == 0, log


def test_an_address_that_is_none_is_wrong_usage() -> None:
    done = execute("from pagekv.executor.server import serve_backend; serve_backend(print, '127.0.0.1:99999')")
    assert done.returncode == 2
    assert "--listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_beyond_the_grace_time_does_not_hold_the_exit(tmp_path: Path) -> None:
    port_file, begun = tmp_path / "port", tmp_path / "begun"
    code = (
        "import sys, time; from pathlib import Path; from pagekv.executor import choose_backend, server\n"
        "from pagekv.executor.oracle.backend import OracleBackend, OracleModel\n"
        f"sleep = lambda seconds: (Path({str(begun)!r}).touch(), time.sleep(seconds))\n"
        "choose_backend.load_backend = lambda config: OracleBackend(OracleModel(), step_time_s=600, sleep=sleep)\n"
        "args = ['--backend', 'oracle', '--listen', '127.0.0.1:0', '--grace-s', '0.2']\n"
        f"sys.exit(server.main([*args, '--port-file', {str(port_file)!r}]))"
    )
    with executing(code) as popen:
        wait_for(port_file.exists)
        with grpc.insecure_channel(read_port_file(port_file)["listen"]) as channel:
            wait_until_serving(channel)
            stub = pb_grpc.ExecutorServiceStub(channel)
            request = attach_request(32)
            call = stub.Run(steps(stub.Attach(request).epoch, 2))
            wait_for(begun.exists)
            assert call.is_active()
            popen.send_signal(signal.SIGTERM)
            _, log = popen.communicate(timeout=START_BOUND_S)
        assert popen.returncode == 0, log
        assert "in the middle of work" in log


@pytest.mark.parametrize(("backend", "heaps"), [("auto", [1]), ("cpu", [1]), ("cuda", []), ("oracle", [])])
def test_threads_share_a_heap_where_the_cpu_may_compute(
    monkeypatch: pytest.MonkeyPatch, backend: str, heaps: list[int]
) -> None:
    shared: list[int] = []
    monkeypatch.setattr(server, "share_heaps", shared.append)
    monkeypatch.setattr(server, "_run", lambda *_: 0)
    assert server.main(["--backend", backend]) == 0
    assert shared == heaps
