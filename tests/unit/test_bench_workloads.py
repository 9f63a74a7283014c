"""The benchmark of named workloads: what it prints, what it draws, and which figures it does not take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_workloads
import pytest
from bench_workloads import WORKLOADS, Workload, behind

SMALL = Workload("a prompt of 400 tokens", lambda: behind(1, 400, (5, 5), (2, 2), 6))


def main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_workloads.py", *args])
    return bench_workloads.main()


def test_a_workload_that_shares_gains_and_one_that_must_not_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of six prompts of 405 tokens five find 400 of theirs."""
    for name, missed in (("system-prompt", 0), ("nothing-shared", 1)):
        monkeypatch.setitem(WORKLOADS, name, SMALL)
        assert main(monkeypatch, "--workload", name, "--json") == missed
        out, err = capsys.readouterr()
        (row,) = json.loads(out)["workloads"]
        assert row["tokens hit"] == pytest.approx(5 * 400 / (6 * 405))
        assert row["first token, ms"] == pytest.approx(row["cached, ms"] * row["times sooner"])
        assert err == (f"{name}: not as expected\n" if missed else "")


def test_a_picture_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pagekv[plot]'")
    monkeypatch.setitem(WORKLOADS, "system-prompt", SMALL)
    shares = [
        {"cached": 0, "first token, ms": 9.0, "requests/s": 2.0},
        {"cached": 4224, "first token, ms": 1.0, "requests/s": 9.0},
    ]
    monkeypatch.setattr(bench_workloads, "by_share", lambda: shares)
    monkeypatch.setattr(bench_workloads, "WORKLOADS", {"system-prompt": SMALL})
    assert main(monkeypatch, "--plot", str(tmp_path / "all.svg")) == 0
    assert main(monkeypatch, "--workload", "system-prompt", "--plot", str(tmp_path / "one.png")) == 0
    assert (tmp_path / "all.svg").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib_and_is_asked_for_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_workloads, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(monkeypatch, "--plot", str(tmp_path / "plot.svg"))
    assert "--plot needs matplotlib: pip install 'pagekv[plot]'" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []
