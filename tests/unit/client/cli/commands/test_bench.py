"""`pagekv bench`: what it sends, measures and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.clients.scripted_server import LOST, Fails, ScriptedServer, chunk, complete

from pagekv.client.cli.main import main
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
    assert err == f"pagekv: {failed}\n"


def test_bench_refuses_what_does_not_fit(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    info = pb.GetModelInfoResponse(max_model_len=200, max_sequence_tokens=100, vocab_size=50)
    server.expect("GetModelInfo", info)
    assert main(["bench", "--prompt-tokens", "90", "--output-tokens", "11"]) == 2
    assert "needs 101 tokens, and the server holds 100" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("short")
    info.max_sequence_tokens = 1000
    server.expect("GetModelInfo", info)
    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[1, 2]))
    assert main(["bench", "--text", str(text)]) == 2
    assert "the text has 2 tokens, and the longest prompt needs 256" in capsys.readouterr().err
