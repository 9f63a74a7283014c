"""`pagekv replay` as people and scripts call it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.clients.stack import environment

from pagekv.client.cli.commands import replay as command
from pagekv.client.cli.main import main as pagekv
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.step_recorder import StepRecorder
from pagekv.kvmanager.replay.cli import main
from pagekv.kvmanager.replay.progress import Progress
from pagekv.kvmanager.replay.report import duration

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


def test_table_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    argv = [MOONCAKE, "--blocks", "1000,4000", "--block-size", "64", "--limit", "12", "--plot", str(picture)]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    head, empty, *table = out.splitlines()
    assert head == "mooncake_sample.jsonl, timed mode: 12 requests, blocks of 64 tokens"
    assert empty == err == ""
    assert table[0].split()[:4] == ["policy", "blocks", "hits/blocks", "hits/tokens"]
    assert [line.split()[1] for line in table[1:]] == ["1,000", "4,000"]
    assert len({len(line) for line in table}) == 1
    names = [element.tag.partition("}")[2] for element in ElementTree.parse(picture).getroot().iter()]
    # Hit rate, and the median and 99th percentile of the time to first token; two capacities each.
    assert (names.count("polyline"), names.count("circle")) == (3, 6)


def test_refusals_say_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "absent")]) == 1
    assert main([AZURE, "--mode", "cache"]) == 1
    assert main([MOONCAKE, "--plot", str(tmp_path / "no" / "plot.svg")]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0].endswith("absent: No such file or directory")
    assert err[1].endswith("has no hash ids, so no prompt shares anything; use --mode timed")
    assert "no/plot.svg" in err[2]


def test_a_recording_of_steps_is_known_for_what_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "steps", "steps")
    StepRecorder(file, eviction_policy="slru", protected_share=0.2, aging=256)
    file.close()
    assert main([str(file.path)]) == 1
    words = "looks like a recording of steps; add --steps before its name"
    assert capsys.readouterr().err == f"pagekv replay: {file.path}: {words}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--blocks 10,x", "argument --blocks: each must be a whole number from 1 to 2147483647, got 'x'; or all"),
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


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    drawn = {}
    for stream in (TerminalStream(), io.StringIO()):
        progress = Progress(stream, rows=2, records=10)
        progress.show(1, "lru, 5 blocks", 5)
        progress.clear()
        drawn[type(stream)] = stream.getvalue()
    assert drawn[io.StringIO] == ""
    assert f"[{'█' * 21}{'·' * 7}] lru, 5 blocks: 5 of 10 requests" in drawn[TerminalStream]
    assert drawn[TerminalStream].endswith("\r\x1b[K")


def test_durations() -> None:
    shown = [duration(seconds) for seconds in (None, 0.00123, 0.0456, 0.789, 12.34, 345.6)]
    assert shown == ["-", "1.2 ms", "45.6 ms", "789 ms", "12.3 s", "346 s"]
