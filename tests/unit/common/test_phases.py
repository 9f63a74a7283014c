"""The parts of a process's start: logged, and told to the one that waits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pagekv.common import phases
from pagekv.common.phases import phase, phases_told
from pagekv.common.port_file import read_port_file, write_port_file


def test_a_phase_is_logged_when_it_begins_and_with_its_seconds_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with phase("importing torch"):
        assert [record.getMessage() for record in caplog.records] == ["importing torch ..."]
    last = caplog.records[-1]
    assert last.getMessage() == "importing torch: done"
    assert vars(last)["fields"]["seconds"] >= 0


def test_a_phase_that_fails_is_not_done(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "port"
    with phases_told(str(path)), pytest.raises(ValueError, match="broken"), phase("loading the weights"):
        raise ValueError("broken")
    assert [record.getMessage() for record in caplog.records] == ["loading the weights ..."]
    assert read_port_file(path) == {}


def test_the_port_file_has_the_phase_under_way_and_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "TELL_EVERY_S", 0.0)
    path = tmp_path / "port"
    write_port_file(path, {"listen": "127.0.0.1:1"})
    with phases_told(str(path)):
        with phase("loading the weights") as loading:
            assert read_port_file(path)["phase"] == {"name": "loading the weights", "percent": None}
            loading.progress(0, 0)
            assert read_port_file(path)["phase"]["percent"] is None
            loading.progress(1, 3)
            assert read_port_file(path) == {
                "listen": "127.0.0.1:1",
                "phase": {"name": "loading the weights", "percent": 33},
            }
        assert read_port_file(path) == {"listen": "127.0.0.1:1"}
    with phase("nobody listens any more"):
        assert read_port_file(path) == {"listen": "127.0.0.1:1"}


def test_progress_is_logged_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(phases, "LOG_EVERY_S", 3600.0)
    with phase("loading") as loading:
        loading.progress(1, 4)
        monkeypatch.setattr(phases, "LOG_EVERY_S", 0.0)
        loading.progress(2, 4)
    percents = [vars(record)["fields"].get("percent") for record in caplog.records]
    assert percents == [None, 50, None]
