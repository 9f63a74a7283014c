"""--record: a workload trace of the requests, which the programs that it is for can read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine.engine_harness import Bench, command, read, run, until

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, root_digest, token_bytes
from pagekv.kvmanager.observe.recording import workload_recorder as request_trace
from pagekv.kvmanager.observe.recording.file import RecordingFile
from pagekv.kvmanager.observe.recording.workload_recorder import WorkloadRecorder, hash_ids
from pagekv.kvmanager.replay.cli import main as replay
from pagekv.kvmanager.replay.trace import read_trace
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams

EIGHT = [*range(8)]
SALT = b"salt"


def identified(prompt: list[int], identity: CacheIdentity) -> GenerateCommand:
    return replace(command("r", prompt), identity=identity)


def ids(prompt: list[int], identity: CacheIdentity = CacheIdentity(), salt: bytes = SALT) -> list[int]:  # noqa: B008 - frozen
    return hash_ids(identified(prompt, identity), 4, salt)


def test_ids_agree_exactly_as_far_as_prompts_do() -> None:
    base = ids([*EIGHT, 8, 9])
    assert len(base) == len(set(base)) == 3
    assert ids([*EIGHT, 8, 9]) == base
    assert ids(EIGHT) == base[:2]
    assert ids([*EIGHT, 8])[:2] == base[:2]
    assert ids([*EIGHT, 8])[2] != base[2]
    assert not set(ids([9, *EIGHT])) & set(base)
    for other in (CacheIdentity("a"), CacheIdentity("", "a"), CacheIdentity(media=(MediaSpan(0, 1, "a"),))):
        assert not set(ids([*EIGHT, 8, 9], other)) & set(base)
    assert ids([*EIGHT, 8, 9], CacheIdentity(media=(MediaSpan(9, 1, "a"),)))[:2] == base[:2]
    assert ids([*EIGHT, 8, 9], CacheIdentity(media=(MediaSpan(9, 1, "a"),)))[2] != base[2]


def test_ids_tell_nothing_without_the_salt() -> None:
    prompt = [*range(40)]
    assert not set(ids(prompt)) & set(ids(prompt, salt=b"other"))
    for root in (root_digest("trace", "", ""), root_digest("f00d", "", "")):
        digests = chain_digests(root, token_bytes(prompt), 4)
        assert not set(ids(prompt)) & {int.from_bytes(digest[:8], "big") >> 11 for digest in digests}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17, 24])
def test_long_prompts_are_hashed_in_pieces(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ids([*range(length)])
    assert len(whole) == -(-length // 4)
    monkeypatch.setattr(request_trace, "_PIECE", 2)
    assert ids([*range(length)]) == whole


def traced(path: Path, body: Any, **config: int) -> list[dict[str, Any]]:
    """Runs a test with a trace being recorded; the lines."""
    file = RecordingFile(path, "requests")
    ticks = iter(range(10**6))
    trace = WorkloadRecorder(file, clock=lambda: next(ticks) * 0.0105)
    run(body, observers=[trace], **config)
    trace.flush()
    file.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_has_every_request_in_order_of_arrival(tmp_path: Path) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.001
        long = engine.submit(command("long", EIGHT, 30))
        short = [engine.submit(command(f"s{i}", [*EIGHT, i], 2)) for i in range(2)]
        several = engine.submit(command("n", [9], 3, n=3))
        beams = GenerateCommand("beams", [7, 7], SamplingParams(max_tokens=5, beam_width=2), 2)
        searched = engine.submit(beams)
        for stream in (*short, several, searched):
            await read(stream)
        aborted = engine.submit(command("aborted", [1, 2, 3], 40))
        await until(lambda: (live := engine._live.get("aborted")) is not None and live.sequences[0].num_tokens > 8)
        engine.abort("aborted")
        await read(aborted)
        never = engine.submit(command("never", [5], 4))
        engine.abort("never")
        await read(never)
        await read(long)

    lines = traced(tmp_path / "trace", body)
    assert [list(line) for line in lines] == [
        ["timestamp", "input_length", "output_length", "hash_ids", "block_size"]
    ] * 6
    assert [line["timestamp"] for line in lines] == [10, 21, 31, 42, 52, 63]
    assert [line["input_length"] for line in lines] == [8, 9, 9, 1, 2, 3]
    assert [line["output_length"] for line in lines[:5]] == [30, 2, 2, 3, 5]
    assert 5 < lines[5]["output_length"] < 40
    assert [len(line["hash_ids"]) for line in lines] == [2, 3, 3, 1, 1, 1]
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"][:2] == lines[2]["hash_ids"][:2]
    assert {line["block_size"] for line in lines} == {4}


def test_one_long_request_does_not_hold_all_others_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(request_trace, "MAX_WAITING", 5)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.002
        long = engine.submit(command("long", EIGHT, 100))
        for number in range(8):
            await read(engine.submit(command(f"r{number}", [number], 1)))
        # The long one must not end before the recording's own thread has had its turn.
        bench.step_s = 0.3
        await until(lambda: len((tmp_path / "trace").read_bytes().splitlines()) == 6)
        bench.step_s = 0.0
        await read(long)

    lines = traced(tmp_path / "trace", body)
    assert [line["input_length"] for line in lines] == [1] * 6 + [8] + [1] * 2


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests of 13 tokens: three blocks of four that each shares with two others, and one of its own."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for number in range(12):
            prompt = [number % 4] * 12 + [number + 10]
            await read(engine.submit(command(f"r{number}", prompt, 1 + number)))

    path = tmp_path / "trace.jsonl"
    assert len(traced(path, body)) == 12
    return path


def test_pagekv_replay_reads_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = read_trace(trace, tokens_per_id=4)
    assert [record.output_length for record in records] == [*range(1, 13)]
    assert max(i for record in records for i in record.hash_ids) < 12 + 12
    assert replay([str(trace), "--mode", "cache", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["hit_blocks"], row["prompt_blocks"]) == (8 * 3, 12 * 4)
    assert replay([str(trace), "--block-size", "4", "--blocks", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["requests"] == 12
    assert replay([str(trace), "--tokens-per-id", "16"]) == 1
    assert "line 1: block_size: must be 16" in capsys.readouterr().err


def test_kvcache_simulator_reads_it(trace: Path) -> None:
    """The real program: every byte of the trace is a record, and an endless cache hits what is shared."""
    code = "import sys; from kvcache_sim.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["run", "--trace", str(trace), "--model", "llama-3.1-8b", "--budgets-gib", "64", "--policies", "lru"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--backend", "python", "--no-progress", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    metadata = {name: found["metadata"][name] for name in ("requestCount", "blockSize", "eventCount", "uniqueBlocks")}
    assert metadata == {"requestCount": 12, "blockSize": 4, "eventCount": 12 * 4, "uniqueBlocks": 4 * 3 + 12}
    assert (found["metadata"]["parseErrors"], found["metadata"]["skippedRecords"]) == (0, 0)
    # Of the second half of the trace, which it measures, only the last token of each prompt is new.
    assert (found["ceiling"]["hitTokens"], found["ceiling"]["totalTokens"]) == (6 * 12, 6 * 13)


def test_vllm_timed_trace_finds_its_fields(trace: Path) -> None:
    """`vllm bench serve --dataset-name timed_trace`, which is `TimedTrace` of vllm/benchmarks/datasets (0.33): names of
    fields as its flags have them by default, one hash id for every `--timed-trace-chunk-hash-size` tokens, timestamps
    times `--timed-trace-sec-multiplier` (0.001) in seconds.
    """
    labels = {"timestamp": "timestamp", "input_length": "input_length", "output_length": "output_length"}
    for line in trace.read_text().splitlines():
        entry = json.loads(line.strip())
        chunk = entry["block_size"]
        left, prompt = entry[labels["input_length"]], 0
        for _ in entry.get("hash_ids", []):
            prompt += min(chunk, left)
            left -= min(chunk, left)
        assert (prompt, left) == (entry["input_length"], 0)
        assert float(entry[labels["timestamp"]]) * 0.001 >= 0
        assert entry[labels["output_length"]] > 0
