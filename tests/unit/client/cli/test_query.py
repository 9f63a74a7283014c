"""Commands that ask once: what they show to people, to scripts, and of a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from support.clients.scripted_server import ScriptedServer

from pagekv.client.cli.main import main
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2


def test_the_note_of_an_answer_is_for_people_alone(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    free = operator_pb.BlockInfo(state=operator_pb.BLOCK_STATE_FREE)
    for flags, note in (([], "there are more: raise --limit\n"), (["--json"], "")):
        server.expect(
            "ListBlocks",
            operator_pb.ListBlocksResponse(blocks=[free], next_page_token="t"),
        )
        assert main(["blocks", "--limit", "1", *flags]) == 0
        assert capsys.readouterr().err == note


def test_a_failure_comes_behind_what_was_found(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Check", health_pb2.HealthCheckResponse(status="NOT_SERVING"))
    assert main(["health", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"target": target, "status": "not_serving"}
    assert json.loads(err)["error"]["code"] == "UNAVAILABLE"


RUNNING = types_pb2.SEQUENCE_STATE_RUNNING
BLOCK = operator_pb.BlockInfo(
    block_id=3, ref_count=2, state=operator_pb.BLOCK_STATE_ACTIVE, block_hash="ab" * 32, pins=1
)
SMALL = [
    ("model", "GetModelInfo", pb.GetModelInfoResponse(model_id="m", vocab_size=9, has_tokenizer=True), "ids, text\n"),
    ("lookup hi", "LookupPrefix", cache_pb.LookupPrefixResponse(prompt_tokens=8, device_tokens=4, block_ids=[7]),
     "4 of 8 tokens cached (50%): 4 on the device, 0 on the host\nblocks 7\n"),
    ("blocks", "ListBlocks", operator_pb.ListBlocksResponse(blocks=[BLOCK]),
     "    3  active     2     1  abababababababab  -\n"),
    ("blocks", "ListBlocks", operator_pb.ListBlocksResponse(), "no such blocks\n"),
    ("requests", "ListRequests",
     operator_pb.ListRequestsResponse(
         requests=[operator_pb.RequestInfo(request_id="r", state=RUNNING, priority=-2, prompt_tokens=7, namespace="n")]
     ),
     "r        running        -2       7       0          0       0          0  n\n"),
    ("requests", "ListRequests", operator_pb.ListRequestsResponse(), "no live requests\n"),
    ("block-table r", "GetBlockTable",
     operator_pb.GetBlockTableResponse(sequences=[operator_pb.SequenceBlocks(state=RUNNING, block_ids=[5, 2])]),
     "sequence 0: running, 0 tokens, 0 computed; blocks 5 2\n"),
    ("reset-cache --force", "ResetPrefixCache", operator_pb.ResetPrefixCacheResponse(removed_blocks=4),
     "4 blocks removed; 0 sequences preempted, 0 pins ended\n"),
    ("reset-cache --force", "ResetPrefixCache",
     operator_pb.ResetPrefixCacheResponse(removed_blocks=1, preempted_sequences=1, ended_pins=1),
     "1 block removed; 1 sequence preempted, 1 pin ended\n"),
    ("pin hi --lease 60", "PinPrefix", cache_pb.PinPrefixResponse(pin_id="pin-1", pinned_tokens=32),
     "pin-1: 32 tokens pinned for 60 s\n"),
    ("unpin pin-1", "UnpinPrefix", cache_pb.UnpinPrefixResponse(unpinned_tokens=32), "32 tokens unpinned\n"),
    ("unpin pin-1", "UnpinPrefix", cache_pb.UnpinPrefixResponse(), "no such pin, or its lease has ended\n"),
    ("abort r", "Abort", pb.AbortResponse(aborted_request_ids=["r"]), "aborted: r\n"),
    ("tokenize hi", "Tokenize", pb.TokenizeResponse(token_ids=[4, 5]), "4,5\n"),
    ("detokenize 4,5", "Detokenize", pb.DetokenizeResponse(text="hi"), "hi\n"),
]  # fmt: skip  # laid out as a table


@pytest.mark.parametrize(("command", "method", "reply", "shown"), SMALL)
def test_each_small_command_shows_its_answer_and_prints_an_object_as_json(
    server: ScriptedServer,
    target: str,
    capsys: pytest.CaptureFixture[str],
    command: str,
    method: str,
    reply: Any,
    shown: str,
) -> None:
    server.expect(method, reply)
    assert main(command.split()) == 0
    assert shown in capsys.readouterr().out
    server.expect(method, reply)
    assert main([*command.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
