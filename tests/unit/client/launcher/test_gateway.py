"""The gateway's command line, and how it is known to serve."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from support.clients.held_port import held_port

from pagekv.client.errors import PermissionDenied
from pagekv.client.launcher.gateway import GatewayConfig, gateway_args, has_tokenizer, serves


def test_flags_of_the_user_come_after_those_for_one_machine() -> None:
    config = GatewayConfig(policy="random", args=["--health-check-interval-secs=60"])
    args = gateway_args(config, "127.0.0.1:1", "127.0.0.1:2", ["127.0.0.1:3", "127.0.0.1:4"], 70.5)
    assert args[:5] == [
        "--host=127.0.0.1",
        "--port=1",
        "--prometheus-host=127.0.0.1",
        "--prometheus-port=2",
        "--policy=random",
    ]
    # Streams get as long as the managers give them.
    assert "--shutdown-grace-period-secs=71" in args
    assert args.index("--health-check-interval-secs=5") < args.index("--health-check-interval-secs=60")
    assert args[-3:] == ["--worker-urls", "grpc://127.0.0.1:3", "grpc://127.0.0.1:4"]


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    """Answers of an HTTP server by path; "target" is its address."""
    by_path: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in by_path
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps(by_path.get(self.path)).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        by_path["target"] = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield by_path
        server.shutdown()
        thread.join()


def test_it_serves_once_it_has_models_and_knows_enough_healthy_managers(answers: dict[str, Any]) -> None:
    target = answers["target"]
    assert not serves(target, 1)
    for other in ({"healthy_workers": "many"}, {}):
        answers["/readiness"] = other
        assert not serves(target, 1)
    answers["/readiness"] = {"healthy_workers": 1}
    assert not serves(target, 1)
    answers["/v1/models"] = {"data": []}
    assert not serves(target, 1)
    answers["/v1/models"] = {"data": [{"id": "demo"}]}
    assert serves(target, 1)
    assert not serves(target, 2)


def test_nothing_that_listens_does_not_serve() -> None:
    with held_port() as port:
        assert not serves(f"127.0.0.1:{port}", 1)


@contextmanager
def engine(code: grpc.StatusCode, answers: int = 2) -> Iterator[str]:
    """The address of a manager as the gateway sees it, which answers with this status, after so many messages if it is
    OK, when asked for its tokenizer.
    """

    def get_tokenizer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if code is not grpc.StatusCode.OK:
            context.abort(code, "no")
        yield from [b"part"] * answers

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(get_tokenizer)
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("vllm.grpc.engine.VllmEngine", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("code", "answers", "has"), [("OK", 2, True), ("OK", 0, False), ("FAILED_PRECONDITION", 0, False)]
)
def test_a_manager_is_asked_for_its_tokenizer(
    code: str, answers: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of no use on this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with engine(grpc.StatusCode[code], answers) as target:
        assert has_tokenizer(target.replace("127.0.0.1", "0.0.0.0")) is has


def test_a_gateway_that_may_not_ask_is_told_so() -> None:
    with engine(grpc.StatusCode.PERMISSION_DENIED) as target, pytest.raises(PermissionDenied):
        has_tokenizer(target)
