"""`pagekv demo`: what it asks of the stack that it started, and when it has failed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from support.clients.scripted_server import ScriptedServer, chunk, complete

from pagekv.client import PageKVClient
from pagekv.client.cli.commands import demo
from pagekv.client.cli.main import main, make_parser
from pagekv.client.cli.terminal import Terminal
from pagekv.client.errors import PageKVError
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_an_oracle_without_a_tokenizer_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--backend", "oracle"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(
            "pagekv: the demo shows text, which needs a tokenizer, and --backend oracle has none: add --tokenizer demo"
        )
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--max-tokens=0", "must be a whole number from 1 to 2147483647, got '0'"),
        ("--temperature=-1", "must be a number from 0 to 100, got '-1'"),
        ("--prompt=", "must not be empty"),
    ],
)
def test_what_the_manager_would_refuse_after_the_start_is_refused_before(
    flag: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start takes 6 s."""
    with pytest.raises(SystemExit, match="2"):
        main(["demo", flag])
    assert f"argument {flag.partition('=')[0]}: {words}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cached", "again", "works"), [(16, 7, True), (0, 7, False), (16, 8, False)], ids=["works", "no hit", "differs"]
)
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["people", "json"])
def test_the_second_run_has_to_hit_the_cache_and_say_the_same(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], flags: list[str], cached: int, again: int, works: bool
) -> None:
    args: Any = make_parser().parse(["demo", "--prompt", "x", *flags])
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", block_size=16))
    server.expect("Generate", chunk(4), complete(4))
    server.expect("Generate", chunk(7, prompt=40), complete(7, prompt=40))
    server.expect("Generate", chunk(again, prompt=40, cached=cached), complete(again, prompt=40, cached=cached))
    server.expect("GetStats", operator_pb.GetStatsResponse(generated_tokens_total=3, steps_total=2))
    with PageKVClient(server.target) as client:
        failure = "a prompt that was sent again did not hit the prefix cache, or gave another text"
        with nullcontext() if works else pytest.raises(PageKVError, match=failure):
            assert demo._show(client, args, Terminal(), 0.5) == 0
    out = capsys.readouterr().out
    if flags:
        assert json.loads(out)["cached_tokens"] == [0, cached]
    else:
        assert f"the texts are {'equal' if again == 7 else 'DIFFERENT'}" in out
