"""Files that are read again: once for a change, after it is whole, and never half."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.event_loop import in_event_loop, until

from pagekv.common.watched_files import WatchedFiles


@in_event_loop
async def test_a_change_is_read_once_and_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    seen: list[str] = []

    def reload() -> None:
        seen.append(first.read_text() + (second.read_text() if second.exists() else ""))
        if seen[-1] == "bad":
            raise ValueError("cannot be used")

    files = WatchedFiles("test", [first, second], reload)
    watching = asyncio.create_task(files.watch(0.05))
    await asyncio.sleep(0.3)
    assert seen == []
    first.write_text("22")
    await until(lambda: seen == ["22"])
    second.write_text("3")  # comes into being
    await until(lambda: seen == ["22", "223"])
    second.unlink()
    assert not files.are_refused
    first.write_text("bad")
    await until(lambda: files.are_refused)
    await asyncio.sleep(0.3)
    assert seen[-1] == "bad"
    assert seen.count("bad") == 1
    first.write_text("good")
    await until(lambda: not files.are_refused)
    assert seen[-1] == "good"
    watching.cancel()


@in_event_loop
async def test_an_error_of_any_kind_ends_no_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a"
    path.write_text("1")

    applied: list[str] = []
    loop_thread = threading.get_ident()

    def reload() -> Callable[[], None]:
        assert threading.get_ident() != loop_thread
        text = path.read_text()

        def apply() -> None:
            assert threading.get_ident() == loop_thread
            if text == "bad":
                raise RuntimeError("nobody thought of it")
            applied.append(text)

        return apply

    files = WatchedFiles("test", [path], reload)
    watching = asyncio.create_task(files.watch(0.02))
    path.write_text("bad")
    await until(lambda: files.are_refused)
    path.write_text("good")
    await until(lambda: applied == ["good"])
    assert "nobody thought of it" in caplog.text
    watching.cancel()


@in_event_loop
async def test_files_that_could_not_be_used_are_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As those of a certificate that is not valid yet, or that came while the process had no descriptor left."""
    path = tmp_path / "a"
    path.write_text("1")
    errors = ["not valid yet", "not valid yet", "no descriptor left"]
    read: list[str] = []

    def reload() -> None:
        if errors:
            raise ValueError(errors.pop(0))
        read.append(path.read_text())

    files = WatchedFiles("test", [path], reload)
    watching = asyncio.create_task(files.watch(0.01))
    path.write_text("22")
    await until(lambda: bool(read))
    await asyncio.sleep(0.3)
    assert read == ["22"]
    logged = [str(vars(record)["fields"]["error"]) for record in caplog.records if record.levelname == "ERROR"]
    assert logged == ["not valid yet", "no descriptor left"]
    watching.cancel()


@in_event_loop
async def test_a_change_while_the_files_are_first_read_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    read: list[str] = []
    files = WatchedFiles("test", [path], lambda: read.append(path.read_text()))
    path.write_text("22")  # after the object was made, before it watches
    watching = asyncio.create_task(files.watch(0.05))
    await until(lambda: read == ["22"])
    watching.cancel()


@in_event_loop
async def test_files_that_keep_changing_are_read_when_they_rest(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("")
    read: list[int] = []
    files = WatchedFiles("test", [path], lambda: read.append(len(path.read_text())))
    watching = asyncio.create_task(files.watch(0.2))
    for size in range(1, 41):
        path.write_text("x" * size)
        await asyncio.sleep(0.02)
    await until(lambda: read[-1:] == [40])
    assert len(read) <= 2  # one more on a machine that stood still in between
    watching.cancel()


@in_event_loop
async def test_a_file_that_is_opened_to_others_is_read_again(tmp_path: Path) -> None:
    """Of a key that says no more than who may read it, which is reason enough to refuse it."""
    path = tmp_path / "a"
    path.touch(0o600)
    seen: list[int] = []
    files = WatchedFiles("test", [path], lambda: seen.append(path.stat().st_mode & 0o777))
    watching = asyncio.create_task(files.watch(0.02))
    path.chmod(0o644)
    await until(lambda: seen == [0o644])
    watching.cancel()
