"""`pagekv bench`: what it sends, measures and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.clients.scripted_server import LOST, Fails, ScriptedServer, chunk, complete

from pagekv.client.cli.commands import bench
from pagekv.client.cli.main import main
from pagekv.client.planning.load_test import Diagnosis, LatencySpread, LoadReport, Objectives, Workload
from pagekv.v1 import inference_service_pb2 as pb


def test_bench_reports_what_it_measured(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[list[int]] = []

    def check(request: pb.GenerateRequest) -> None:
        assert request.sampling_params.ignore_eos
        assert request.sampling_params.max_tokens == 2
        prompts.append(list(request.prompt.token_ids.ids))

    info = pb.GetModelInfoResponse(
        model_id="m", max_sequence_tokens=100, vocab_size=50, eos_token_ids=[0], block_size=16, num_device_blocks=7
    )
    command = "bench --requests 4 --concurrency 2 --shared-prefix 8 --prompt-tokens 2:4 --output-tokens 2 --seed 1"
    # No machine is so busy that it misses these.
    command += " --max-ttft-ms 60000 --max-inter-token-ms 60000"

    def expect_run() -> None:
        server.expect("GetModelInfo", info)
        for number in range(4):
            if number == 3:
                server.expect("Generate", Fails(LOST), check=check)
            else:
                server.expect(
                    "Generate",
                    chunk(1, prompt=10, cached=8),
                    chunk(2, prompt=10, done=1),
                    complete(1, 2, prompt=10, cached=8),
                    check=check,
                )

    expect_run()
    assert main([*command.split(), "--json"]) == 1
    out, err = capsys.readouterr()
    failed = "1 of 4 requests failed: 1 ConnectionLost"
    assert json.loads(err) == {"error": {"code": "FAILED", "message": failed}}
    result = json.loads(out)
    report = result["report"]
    assert (report["completed"], report["errors"]) == (3, {"ConnectionLost": 1})
    assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (30, 24, 6)
    assert report["hit_rate"] == 0.8
    assert report["ttft_s"]["p50"] <= report["total_s"]["p50"]
    assert result["workload"]["shape"].startswith(
        "4 requests, closed loop of 2, prompts of 2 to 4 tokens after a shared"
    )
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} <= {10, 11, 12}
    assert all(0 < token < 50 for prompt in prompts for token in prompt)
    first = sorted(prompts)
    prompts.clear()
    expect_run()
    assert main(command.split()) == 1
    out, err = capsys.readouterr()
    assert sorted(prompts) == first
    for words in ("time to first token", "inter-token latency", "p99", "80.0% hits", "1 ConnectionLost", "seed 1"):
        assert words in out
    assert err.splitlines()[0].startswith("sending 4 requests, closed loop of 2")
    assert err.endswith(f"pagekv: {failed}\n")
    assert "3 of 3 requests met the objectives: first token within 60000 ms, then 60000 ms a token." in out


def test_bench_refuses_what_does_not_fit(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    info = pb.GetModelInfoResponse(max_model_len=200, max_sequence_tokens=100, vocab_size=50)
    server.expect("GetModelInfo", info)
    assert main(["bench", "--prompt-tokens", "90", "--output-tokens", "11"]) == 2
    assert "needs 101 tokens, and the server serves at most 100" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("short")
    info.max_sequence_tokens = 1000
    server.expect("GetModelInfo", info)
    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[1, 2]))
    assert main(["bench", "--text", str(text)]) == 2
    assert "the text has 2 tokens, and the longest prompt needs 256" in capsys.readouterr().err


def report(diagnoses: dict[str, int]) -> LoadReport:
    spread = LatencySpread(0.4, 0.7, 0.8, 0.5, 0.812)
    return LoadReport(1.0, 8, {}, 8, 0, 8, 0.0, 8.0, 8.0, 16.0, spread, LatencySpread(*[0.061] * 5), spread, diagnoses)


WORKLOAD = Workload(8, 4, None, (1, 1), (1, 1), 0, 0.0, 1)


def test_the_verdict_says_how_many_missed_by_how_much_and_why() -> None:
    (late,) = bench.verdict(WORKLOAD, report({Diagnosis.PREFILL.value: 8}), Objectives())
    assert late.startswith(
        "8 of 8 requests missed the objective for the first token: up to 812 ms, bound 500; likely cause: they waited"
    )
    assert "a lower --concurrency" in late
    mixed = report({Diagnosis.PREFILL.value: 1, Diagnosis.DECODE.value: 2, Diagnosis.WITHIN.value: 5})
    first, second, third = bench.verdict(replace(WORKLOAD, concurrency=None, rate=3.0), mixed, Objectives(200, 60))
    assert first.startswith("1 of 8 requests missed the objective for the first token: up to 812 ms, bound 200;")
    assert second.startswith(
        "2 of 8 requests missed the objective between tokens: 61.0 ms on average over all, bound 60; likely"
    )
    assert "a lower --rate" in first
    assert "a lower --rate" in second
    assert third == "5 of 8 met both."
    assert bench.verdict(WORKLOAD, report({}), Objectives()) == []


def test_progress_is_told_into_a_pipe_too(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_PROGRESS_S", 0.0)
    info = pb.GetModelInfoResponse(max_sequence_tokens=100, vocab_size=50, block_size=16, num_device_blocks=7)
    for flags in ([], ["--json"]):
        server.expect("GetModelInfo", info)
        server.expect("Generate", chunk(1, prompt=10), chunk(2, prompt=10, done=1), complete(1, 2, prompt=10))
        assert main(["bench", "--requests", "1", "--prompt-tokens", "2", "--output-tokens", "2", *flags]) == 0
        err = capsys.readouterr().err
        assert ("1 of 1 requests after 0 s, " in err) == (not flags)
        assert "\r" not in err
