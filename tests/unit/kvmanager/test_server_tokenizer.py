"""The manager's tokenizer: where it comes from, when it goes, and one that cannot be used."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.engine import small_tokenizers
from support.engine.running_manager import (
    NOT_SERVING,
    NOWHERE,
    SERVING,
    Running,
    attach,
    config,
    main,
    model,
    run,
)
from support.prompts import as_chat, as_prompt

from pagekv.common.errors import Unavailable
from pagekv.common.port_file import read_port_file
from pagekv.kvmanager import server
from pagekv.kvmanager.text import chat_template, served_tokenizer, worker_process
from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.v1 import inference_service_pb2 as pb

# A template that takes minutes to compile.
FOREVER = "{{ 7 ** 10**8 }}"


def test_health_and_tokenizer_follow_the_executor(tmp_path: Path) -> None:
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))

    async def body(running: Running) -> None:
        engine = running.manager.engine
        attach(engine, model(tmp_path))
        await running.until_health(SERVING)
        assert (await running.stub.GetModelInfo(pb.GetModelInfoRequest())).has_tokenizer
        engine._on_attached(False)
        await running.until_health(NOT_SERVING)
        # An executor comes back with a model that has no tokenizer.
        attach(engine, model(tmp_path / "empty", fingerprint="2"))
        await running.until_health(SERVING)
        info = await running.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.has_tokenizer, info.model_fingerprint) == (False, "2")

    assert run(config(tmp_path), body) == 0


def test_processes_of_a_tokenizer_end_with_its_model_and_with_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_process, "SETUP_CPU_S", 3600.0)
    used: list[tuple[Tokenizer, subprocess.Popen[bytes]]] = []

    async def use(running: Running, name: str) -> None:
        """Serves a model until a long text has made a process for it."""
        where = tmp_path / name
        where.mkdir()
        small_tokenizers.byte_level().save(str(where / "tokenizer.json"))
        # Being compiled when the model ends, which is no fault of it.
        (where / "chat_template.jinja").write_text(FOREVER)
        info = replace(model(where, fingerprint=name), max_model_len=2**20)
        attach(running.manager.engine, info)
        while not used or used[-1][0].directory != where:
            tokenizer = running.manager._tokenizer.kept
            if tokenizer is not None and tokenizer.directory == where:
                await tokenizer.encode_long("a" * 10, special_tokens=False, limit=100)
                used.append((tokenizer, tokenizer._worker._processes[0]))
            await asyncio.sleep(0.005)

    async def body(running: Running) -> None:
        await use(running, "first")
        await use(running, "second")
        assert await asyncio.to_thread(used[0][1].wait, 120) == -signal.SIGKILL
        with pytest.raises(Unavailable):
            await used[0][0].encode_long("a", special_tokens=False, limit=100)
        assert used[1][1].poll() is None

    assert run(config(tmp_path), body) == 0
    assert used[1][1].wait(120) == -signal.SIGKILL
    assert "conversations will be refused" not in caplog.text


def test_no_tokenizer_is_looked_for_when_none_is_wanted(tmp_path: Path) -> None:
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))

    async def body(running: Running) -> None:
        attach(running.manager.engine, model(tmp_path))
        await running.until_health(SERVING)
        assert "no tokenizer" in ((await running.refusal()).details() or "")

    assert run(config(tmp_path, "--tokenizer", "none"), body) == 0


def test_an_executor_without_a_model_directory_is_served_with_token_ids(tmp_path: Path) -> None:
    async def body(running: Running) -> None:
        attach(running.manager.engine, replace(model(tmp_path), model_id=""))
        await running.until_health(SERVING)
        assert not (await running.stub.GetModelInfo(pb.GetModelInfoRequest())).has_tokenizer

    assert run(config(tmp_path), body) == 0


def test_a_tokenizer_that_is_loaded_too_late_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    loading, closed = threading.Event(), threading.Event()

    def load(name: str) -> Tokenizer:
        loading.set()
        assert closed.wait(120)
        return Tokenizer.load(Path(name))

    async def last() -> None:
        """Behind everything else that is closed."""
        closed.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        for _ in range(100):
            await asyncio.sleep(0)

    managers: list[server.Manager] = []

    async def body(running: Running) -> None:
        managers.append(running.manager)
        attach(running.manager.engine, model(tmp_path))
        await asyncio.to_thread(loading.wait, 120)

    start = server.Manager._start

    async def with_last(self: server.Manager) -> None:
        self._opened.push_async_callback(last)
        await start(self)

    monkeypatch.setattr(served_tokenizer, "load_tokenizer", load)
    monkeypatch.setattr(server.Manager, "_start", with_last)
    assert run(config(tmp_path), body) == 0
    assert managers[0]._tokenizer.kept is None


def test_a_model_with_a_faulty_template_is_served_with_token_ids(tmp_path: Path) -> None:
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes("Grüße".encode("latin-1"))

    async def body(running: Running) -> None:
        attach(running.manager.engine, model(tmp_path))
        await running.until_health(SERVING)
        assert not (await running.stub.GetModelInfo(pb.GetModelInfoRequest())).has_tokenizer

    assert run(config(tmp_path), body) == 0


def test_a_tokenizer_that_is_named_with_a_faulty_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_bytes("Grüße".encode("latin-1"))
    flags = ["--listen", "127.0.0.1:0", "--executor", NOWHERE, "--port-file", str(tmp_path / "port")]
    status, words = main([*flags, "--tokenizer", str(tmp_path)], caplog)
    assert status == 1
    assert f"cannot start: {read_port_file(tmp_path / 'port')['cannot_start']}" == words
    assert "chat_template.jinja cannot be read" in words


@pytest.mark.parametrize("make", [False, True])
def test_a_tokenizer_that_is_named_must_be_there(tmp_path: Path, make: bool, caplog: pytest.LogCaptureFixture) -> None:
    where = tmp_path / "model"
    if make:
        where.mkdir()
    flags = ["--listen", "127.0.0.1:0", "--executor", NOWHERE, "--port-file", str(tmp_path / "port")]
    status, words = main([*flags, "--tokenizer", str(where)], caplog)
    assert status == 1
    # `pagekv up` tells this in one line, in the place of the log.
    assert f"cannot start: {read_port_file(tmp_path / 'port')['cannot_start']}" == words
    assert words.startswith("cannot start: --tokenizer cannot be used: ")
    assert ("no tokenizer.json: save" if make else "neither a model directory") in words


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10**10 }}", "more memory than it may have"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0.5 s of a processor",
        ),
        ("{{ messages | nonsense }}", "No filter named 'nonsense'"),
    ],
)
def test_a_chat_template_that_runs_away_holds_up_neither_the_start_nor_others(
    template: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.5)
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)

    async def body(running: Running) -> None:
        attach(running.manager.engine, model(tmp_path))
        await running.until_health(SERVING)
        chat = asyncio.ensure_future(running.stub.Tokenize(pb.TokenizeRequest(prompt=as_chat(("user", "hi")))))
        assert await running.health() == SERVING
        assert (await running.stub.Tokenize(pb.TokenizeRequest(prompt=as_prompt("hi")))).token_ids
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith("prompt.chat.messages: the")
        assert words in (caught.value.details() or "")

    assert run(config(tmp_path), body) == 0


def test_the_log_names_a_tokenizer_that_does_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    caplog.set_level(logging.INFO)

    async def body(running: Running) -> None:
        attach(running.manager.engine, model(tmp_path, vocab_size=300))
        await running.until_health(SERVING)

    assert run(config(tmp_path), body) == 0
    record = next(record for record in caplog.records if "more token ids than the model" in record.getMessage())
    assert vars(record)["fields"]["model"] == 300
    assert vars(record)["fields"]["tokenizer"] > 300
