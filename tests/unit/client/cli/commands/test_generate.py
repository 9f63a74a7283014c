"""`pagekv generate` and `pagekv chat`: what they print for people and for scripts."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from support.clients.scripted_server import Fails, ScriptedServer, answer, chunk, complete

from pagekv.client.cli.main import main
from pagekv.client.cli.streamed_answer import Stopwatch
from pagekv.client.generation_types import Chunk
from pagekv.common import errors
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


def test_generate_streams_text_and_sums_up_on_standard_error(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(request: pb.GenerateRequest) -> None:
        sampling = request.sampling_params
        assert request.prompt.text == "hello"
        assert (sampling.max_tokens, sampling.seed, list(sampling.stop)) == (9, 3, ["a", "b"])
        assert sampling.temperature == 0
        assert sampling.HasField("temperature")
        assert not sampling.HasField("top_p")
        assert request.cache.namespace == "mine"

    server.expect("Generate", chunk(4, cached=2), chunk(5, done=1, cached=2), complete(4, 5, cached=2), check=check)
    command = "generate hello --max-tokens 9 --temperature 0 --seed 3 --stop a --stop b --namespace mine"
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    assert out == "t4 t5 \n"
    assert err.startswith("[3 prompt tokens (2 cached) · 2 generated · TTFT ")
    assert err.endswith(" · length]\n")
    assert "\x1b" not in out + err


def test_generate_json(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("Generate", chunk(4), complete(4))
    assert main(["generate", "--token-ids", "1,2 3", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["completions"][0]["token_ids"] == [4]
    assert result["completions"][0]["finish_reason"] == "length"
    assert result["ttft_s"] > 0
    assert err == ""


@pytest.mark.parametrize("switches", [[], ["--json"]])
def test_an_outage_is_told_and_the_text_goes_on(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], switches: list[str]
) -> None:
    server.expect("Generate", chunk(4), Fails(errors.Draining("shuts down", 0.01)))
    server.expect("Generate", chunk(5, done=1), complete(5, resumed=1))
    assert main(["generate", "x", *switches]) == 0
    out, err = capsys.readouterr()
    if switches:
        assert (json.loads(out)["completions"][0]["resumes"], err) == (1, "")
    else:
        assert out == "t4 t5 \n"
        assert err.startswith("pagekv: connection lost, trying again for up to 30 s\n[")
        assert " · resumed once · " in err


def test_generate_reads_standard_input(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for text in ("from a file", "from echo\n", "two\n\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        server.expect("Generate", *answer(4), check=lambda request: seen.append(request.prompt.text))
        assert main(["generate", "-"]) == 0
    assert seen == ["from a file", "from echo", "two\n"]


@pytest.mark.parametrize(("replies", "text"), [([], ""), ([chunk(4)], "t4 \n")], ids=["at once", "in the middle"])
def test_an_error_stands_on_a_line_of_its_own(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], replies: list[Any], text: str
) -> None:
    server.expect("Generate", *replies, Fails(errors.InvalidRequest("sampling_params.top_p", "must be above 0")))
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr() == (text, "pagekv: sampling_params.top_p: must be above 0\n")


def test_after_ctrl_c_the_prompt_stands_on_a_line_of_its_own(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Stopwatch, chunk: Chunk) -> None:
        if 5 in chunk.token_ids:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stopwatch, "see", interrupted)
    server.expect("Generate", chunk(4), chunk(5, done=1), complete(4, 5))
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr() == ("t4 \n", "")


def test_generate_several(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    replies = [complete(5, index=1), complete(4, index=0)]
    server.expect("Generate", *replies)
    assert main(["generate", "x", "--n", "2"]) == 0
    assert capsys.readouterr().out == "t4 \nt5 \n"
    server.expect("Generate", *replies)
    assert main(["generate", "x", "--n", "2", "--json"]) == 0
    texts = [completion["text"] for completion in json.loads(capsys.readouterr().out)["completions"]]
    assert texts == ["t4 ", "t5 "]


def test_generate_with_beam_search(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[pb.GenerateRequest] = []
    best = complete(4, 5, reason=types_pb2.FINISH_REASON_STOP, stop_token_id=5, cumulative_logprob=-1.5)
    server.expect("Generate", best, complete(6, index=1, cumulative_logprob=-2.25), check=sent.append)
    assert main(["generate", "x", "--beam-width", "4", "-n", "2", "--length-penalty", "0.5", "--early-stopping"]) == 0
    out, err = capsys.readouterr()
    assert out == "t4 t5 \nt6 \n"
    assert err.splitlines() == [
        "--- 0: 2 tokens · stop · log-probability -1.500, -0.750 a token",
        "--- 1: 1 token · length · log-probability -2.250, -2.250 a token",
    ]
    sampling = sent[0].sampling_params
    assert (sampling.beam_width, sampling.n, sampling.length_penalty, sampling.early_stopping) == (4, 2, 0.5, True)


def test_generate_with_beam_search_prints_the_best_when_one_is_asked_for(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Generate", complete(4, cumulative_logprob=-1.5))
    assert main(["generate", "x", "--beam-width", "4", "--json"]) == 0
    (completion,) = json.loads(capsys.readouterr().out)["completions"]
    assert (completion["token_ids"], completion["cumulative_logprob"]) == ([4], -1.5)


def test_token_ids_are_shown_where_there_is_no_text(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Generate", chunk(4, 5, text=""), complete(4, 5, text=""))
    assert main(["generate", "--token-ids", "1"]) == 0
    assert capsys.readouterr().out == "4 5\n"
