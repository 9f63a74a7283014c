"""`pagekv replay` as people and scripts call it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.clients.stack import environment
from support.terminal import TerminalStream

from pagekv.client.cli.commands import replay as command
from pagekv.client.cli.main import main as pagekv
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.step_recorder import StepRecorder
from pagekv.kvmanager.replay import cli
from pagekv.kvmanager.replay.cli import main

DATA = Path(__file__).resolve().parents[3] / "data" / "traces"
MOONCAKE, AZURE = str(DATA / "mooncake_sample.jsonl"), str(DATA / "azure_sample.csv")


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    value: dict[str, Any] = json.loads(out)
    return value


def test_one_row_for_each_policy_and_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, MOONCAKE, "--mode", "cache", "--blocks", "20,all", "--policy", "lru,slru,none")
    assert found["options"]["block_size"] == 512
    assert [(row["policy"], row["unbounded"]) for row in found["rows"]] == [
        ("lru", False),
        ("lru", True),
        ("slru", False),
        ("slru", True),
        ("none", False),
        ("none", True),
    ]
    lru, unbounded, _, slru = found["rows"][:4]
    assert lru["block_hit_rate"] == lru["hit_blocks"] / lru["prompt_blocks"] <= unbounded["block_hit_rate"]
    assert unbounded["hit_blocks"] == slru["hit_blocks"]
    assert lru["timing"] is None


def test_timed_mode_reports_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, AZURE, "--blocks", "2000", "--limit", "20")
    (row,) = found["rows"]
    assert (found["options"]["block_size"], row["requests"], row["hit_blocks"]) == (16, 20, 0)
    timing = row["timing"]
    assert 0 < timing["ttft_s"]["p50"] <= timing["ttft_s"]["p99"] <= timing["ttft_s"]["max"]
    assert 0.9 < timing["utilisation"] <= 1


def test_the_table_has_a_row_for_each_capacity_and_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [MOONCAKE, "--blocks", "1000,4000", "--block-size", "64", "--limit", "12"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    head, empty, *table, refused = out.splitlines()
    assert refused == "refused: requests that need more blocks than the pool has; the hit rates leave them out"
    assert head == "mooncake_sample.jsonl, timed mode: 12 requests, blocks of 64 tokens"
    assert empty == err == ""
    assert table[0].split()[:4] == ["policy", "blocks", "hits/blocks", "hits/tokens"]
    assert [line.split()[1] for line in table[1:]] == ["1,000", "4,000"]
    assert len({len(line) for line in table}) == 1


def test_a_picture_needs_matplotlib_and_is_asked_for_before_anything_is_replayed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert main([MOONCAKE, "--plot", str(tmp_path / "plot.svg")]) == 1
    assert capsys.readouterr() == ("", "pagekv replay: --plot needs matplotlib: pip install 'pagekv[plot]'\n")
    assert [*tmp_path.iterdir()] == []


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'pagekv[plot]'")
    for name, head in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.txt", b"<?xml")):
        argv = [MOONCAKE, "--blocks", "1000,4000", "--block-size", "64", "--limit", "12", "--policy", "lru,none"]
        assert main([*argv, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(head)


def test_refusals_say_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "absent")]) == 1
    assert main([AZURE, "--mode", "cache"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0].endswith("absent: No such file or directory")
    assert err[1].endswith("has no hash ids, so no prompt shares anything; use --mode timed")


def test_a_recording_of_steps_is_known_for_what_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "steps", "steps")
    StepRecorder(file, EngineConfig())
    file.close()
    assert main([str(file.path)]) == 1
    words = "looks like a recording of steps; add --steps before its name"
    assert capsys.readouterr().err == f"pagekv replay: {file.path}: {words}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--blocks 10,x", "argument --blocks: each must be a whole number from 1 to 536870912, got 'x'; or all"),
        ("--blocks 0", "argument --blocks: each must be"),
        ("--policy lru,mru", "argument --policy: each must be one of lru, slru, none, got 'mru'"),
        ("--block-size 24", "argument --block-size: must be a power of two"),
        ("--speed 0", "argument --speed: must be a number"),
        ("--step-ms nan", "argument --step-ms: must be a number"),
        ("--mode slow", "argument --mode: invalid choice"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main([MOONCAKE, *flags.split()])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_pagekv_hands_everything_on_to_a_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    assert pagekv(["replay", "--mode", "cache", "--json", MOONCAKE, "--limit", "5"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["requests"] == 5
    assert pagekv(["replay", "--blocks", "none", MOONCAKE]) == 2
    assert capfd.readouterr().err.startswith("pagekv replay: argument --blocks: each must be")
    assert pagekv(["replay", "--help"]) == 0
    assert "--kv-read-ns" in capfd.readouterr().out


def test_pagekv_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NEEDED", ("no_such_module",))
    assert pagekv(["replay", MOONCAKE]) == 1
    assert capsys.readouterr().err == "pagekv: replay needs no_such_module: pip install 'pagekv[manager]'\n"


def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for stream in (TerminalStream(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main([MOONCAKE, "--mode", "cache", "--blocks", "5,9", "--limit", "3"]) == 0
        shown[type(stream)] = stream.getvalue()
    assert shown[io.StringIO] == ""
    first, second, rest = shown[TerminalStream].split("\n")
    assert first.endswith("\rslru, 5 blocks (1 of 2): 3 of 3 requests")
    assert second.endswith("\rslru, 9 blocks (2 of 2): 3 of 3 requests")
    assert rest == ""


def test_a_quiet_tenant_alone_and_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [MOONCAKE, "--blocks", "400,800", "--block-size", "512", "--limit", "12", "--tenants", "2"]
    found = report(capsys, *argv)
    assert [(row["blocks"], row["case"]) for row in found["rows"]] == [
        (blocks, case) for blocks in (400, 800) for case in ("alone", "one", "fair", "floor")
    ]
    assert main(argv) == 0
    head, second, empty, *table = capsys.readouterr().out.splitlines()
    assert head == "mooncake_sample.jsonl, timed mode: 12 requests, blocks of 512 tokens"
    assert second.startswith("2 tenants: the first has one conversation of each 8 and is quiet")
    assert empty == ""
    assert len(table) == 9
    assert main([AZURE, "--tenants", "60"]) == 1
    assert (
        capsys.readouterr().err == "pagekv replay: --tenants 60: the trace has too few conversations for this number\n"
    )
    for more in (["--mode", "cache"], ["--plot", "p.svg"]):
        with pytest.raises(SystemExit) as wrong:
            main([*argv, *more])
        assert wrong.value.code == 2
        assert "--tenants: needs --mode timed, and no --plot" in capsys.readouterr().err
