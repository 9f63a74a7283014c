"""A scripted server, and one client in its blocking and its asyncio form: every test that takes `client` runs twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client import AsyncPageKVClient, AsyncStream, AsyncWatch, PageKVClient
from pagekv.client.cli.main import main
from pagekv.client.identity import API_KEY_VARIABLE, FILE_VARIABLES
from pagekv.client.proxy import DIRECT_VARIABLES, PROXY_VARIABLES


class BlockingStream:
    """An AsyncStream or AsyncWatch with the methods of a Stream or Watch."""

    def __init__(self, stream: AsyncStream | AsyncWatch, run: Callable[[Any], Any]) -> None:
        self._stream, self._run = stream, run

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> BlockingStream:
        self._run(self._stream.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._run(self._stream.__aexit__(*error))

    def close(self) -> None:
        self._run(self._stream.close())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BlockingAsyncClient:
    """An AsyncPageKVClient with the methods of a PageKVClient, on an event loop in another thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make() -> AsyncPageKVClient:
            return AsyncPageKVClient(*args, **kwargs)

        self._client = self._run(make())

    def with_options(self, **options: Any) -> BlockingAsyncClient:
        other = object.__new__(BlockingAsyncClient)
        vars(other).update(vars(self))
        other._client = self._client.with_options(**options)
        return other

    def close(self) -> None:
        self._run(self._client.close())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stream(self, *args: Any, **kwargs: Any) -> BlockingStream:
        return BlockingStream(self._client.stream(*args, **kwargs), self._run)

    def watch_events(self, **kwargs: Any) -> BlockingStream:
        return BlockingStream(self._client.watch_events(**kwargs), self._run)

    def iter_requests(self) -> Iterator[Any]:
        return self._each(self._client.iter_requests())

    def iter_blocks(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._each(self._client.iter_blocks(*args, **kwargs))

    def _each(self, items: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._run(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            self._run(items.aclose())

    def _run(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._run(method(*args, **kwargs))


@pytest.fixture(autouse=True)
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing of the identity and the proxy that the caller of the tests has; the folder of configurations."""
    for name in (API_KEY_VARIABLE, *FILE_VARIABLES.values(), *PROXY_VARIABLES, *DIRECT_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `pagekv certs` makes; to be left as they are."""
    directory = tmp_path_factory.mktemp("certificates")
    assert main(["certs", str(directory)]) == 0
    return directory


@pytest.fixture
def secure_server(certificates: Path) -> Iterator[ScriptedServer]:
    """A manager with TLS, for callers with a certificate alone."""
    pair = (certificates / "manager.key").read_bytes(), (certificates / "manager.pem").read_bytes()
    authority = (certificates / "ca.pem").read_bytes()
    script = ScriptedServer(credentials=grpc.ssl_server_credentials([pair], authority, require_client_auth=True))
    script.start()
    try:
        yield script
        script.finish()
    finally:
        script.stop()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()
    script.start()
    try:
        yield script
        script.finish()
    finally:
        script.stop()


MakeClient = Callable[..., PageKVClient]


@pytest.fixture(params=["sync", "asyncio"])
def make_client(request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    """Makes clients of one form; they are closed after the test."""
    made: list[Any] = []

    def make(target: str, **kwargs: Any) -> Any:
        made.append(
            PageKVClient(target, **kwargs) if request.param == "sync" else BlockingAsyncClient(target, **kwargs)
        )
        return made[-1]

    yield make
    for client in made:
        client.close()
        if isinstance(client, BlockingAsyncClient):
            client.stop()


@pytest.fixture
def client(server: ScriptedServer, make_client: MakeClient) -> PageKVClient:
    return make_client(server.target)


@pytest.fixture
def target(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scripted server's address, as the `pagekv` command finds it."""
    monkeypatch.setenv("PAGEKV_TARGET", server.target)
    return server.target
