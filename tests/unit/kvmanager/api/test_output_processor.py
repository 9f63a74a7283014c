"""Tokens as text: stop tokens, stop strings, and outputs that are resumed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import grpc
import pytest
from support.engine.generate_requests import TOKENIZER
from support.engine.inference_harness import LENGTH, STOP, Harness, bytes_of, request, run, tokens_of
from support.event_loop import run_by

from pagekv.kvmanager.api import output_processor
from pagekv.kvmanager.api.output_processor import SLICE_TOKENS, OutputProcessor
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.request.stream import SequenceDelta
from pagekv.kvmanager.text.detokenizer import Detokenizer
from pagekv.kvmanager.text.stop_strings import StopStrings
from pagekv.kvmanager.text.tokenizer import Tokenizer


@run_by(run)
async def test_a_stop_token_is_reported_and_has_no_text(h: Harness) -> None:
    call = await h.start(request(params={"stop_token_ids": tokens_of("d")}))
    h.engine.push("r", *tokens_of("a"), *tokens_of("d"), finish=FinishReason.STOP)
    chunk = (await call.read()).chunk
    assert (list(chunk.token_ids), chunk.text) == (tokens_of("a") + tokens_of("d"), "a")
    complete = (await call.read()).complete
    assert (complete.finish_reason, complete.stop_token_id, complete.text) == (STOP, tokens_of("d")[0], "a")
    assert complete.WhichOneof("matched_stop") == "stop_token_id"


@run_by(run)
async def test_a_stop_string_across_chunks_ends_the_sequence_and_trims_the_rest(h: Harness) -> None:
    call = await h.start(request(params={"stop": ["\n#"], "logprobs": 0}))
    for text in ["a\n", "#bc"]:
        ids = [token for character in text for token in tokens_of(character)]
        logprobs = [TokenLogprobs(token, -0.5) for token in ids]
        h.engine.live["r"].push(SequenceDelta(0, ids, logprobs))
        if text == "a\n":
            chunk = (await call.read()).chunk
            assert (len(chunk.token_ids), chunk.text) == (2, "a")
    chunk = (await call.read()).chunk
    assert (list(chunk.token_ids), chunk.text) == (tokens_of("#"), "")
    assert len(chunk.logprobs) == 1
    complete = (await call.read()).complete
    assert (complete.finish_reason, complete.stop_string, complete.text) == (STOP, "\n#", "a")
    assert list(complete.token_ids) == tokens_of("a") + tokens_of("\n") + tokens_of("#")
    assert complete.completion_tokens == len(complete.logprobs) == 3
    assert await call.rest() == []
    assert h.engine.stopped == [("r", 0)]
    assert h.engine.aborted == []


@run_by(run)
async def test_a_stop_string_before_min_tokens_is_text(h: Harness) -> None:
    call = await h.start(request(params={"stop": ["b"], "min_tokens": 3}))
    h.engine.push("r", *(tokens_of("a") + tokens_of("b") + tokens_of("a") + tokens_of("b") + tokens_of("a")))
    chunk = (await call.read()).chunk
    assert (chunk.text, len(chunk.token_ids)) == ("aba", 4)
    assert (await call.read()).complete.stop_string == "b"


@pytest.mark.parametrize(("text", "least", "ends"), [("ab", 2, None), ("ab", 1, 2), ("abab", 2, 4), ("b", 0, 1)])
@pytest.mark.parametrize("resumed", [False, True])
def test_min_tokens_come_before_the_token_that_completes_a_stop_string(
    text: str, least: int, ends: int | None, resumed: bool
) -> None:
    """As before a stop token, which the executor bans until there are so many."""
    ids = [token for character in text for token in tokens_of(character)]
    sampling = SamplingParams(max_tokens=20, min_tokens=least)
    given = ids if resumed else []
    command = GenerateCommand("r", array("I", [5, *given]), sampling, 1, len(given))
    output = OutputProcessor(command, StopStrings(["b"]), TOKENIZER)
    assert list(output.resume(())) == []
    found = output.end_of_resumed() if resumed else output.take(SequenceDelta(0, ids))
    assert (found.stop_string if found else None) == (None if ends is None else "b")
    assert output.num_tokens == (ends or len(ids))


@run_by(run)
async def test_text_held_back_for_a_stop_string_comes_with_the_end(h: Harness) -> None:
    call = await h.start(request(params={"stop": ["xyz"]}))
    h.engine.push("r", *tokens_of("x"))
    assert (await call.read()).chunk.text == ""
    h.engine.push("r", *tokens_of("y"), finish=FinishReason.LENGTH)
    assert (await call.read()).chunk.text == "xy"
    assert (await call.read()).complete.text == "xy"


@run_by(run)
async def test_resumed_text_goes_on_exactly_where_it_broke_off(h: Harness) -> None:
    """The first stream had sent two of the four bytes of an emoji, and held back what may become a stop string."""
    smile = bytes_of("😀")
    sent = tokens_of("a") + smile[:2]
    call = await h.start(request(resumed_token_ids=sent, params={"stop": ["😀x"]}))
    assert h.engine.commands[0].resumed_tokens == 3
    h.engine.cached_tokens = 4
    h.engine.push("r", *smile[2:])
    chunk = (await call.read()).chunk
    assert (chunk.text, chunk.completion_tokens, chunk.prompt_tokens) == ("", 5, 2)
    h.engine.push("r", *tokens_of("y"), finish=FinishReason.LENGTH)
    assert (await call.read()).chunk.text == "😀y"
    complete = (await call.read()).complete
    assert (complete.text, list(complete.token_ids)) == ("😀y", smile[2:] + tokens_of("y"))
    assert complete.completion_tokens == 6
    # Four of the five tokens that the engine was given were cached: the prompt has two.
    assert (chunk.cached_tokens, complete.cached_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("params", "output", "reason", "matched"),
    [
        ({"max_tokens": 2}, "ab", LENGTH, None),
        ({"stop": ["b"]}, "ab", STOP, "stop_string"),
        ({"stop_token_ids": tokens_of("b")}, "ab", STOP, "stop_token_id"),
        ({}, "a</s>", STOP, "stop_token_id"),
        # A stop token has no text, so it completes no stop string.
        ({"stop_token_ids": tokens_of("b"), "stop": ["ab"]}, "ab", STOP, "stop_token_id"),
        ({"stop": ["two words"]}, "atwo words ✓", STOP, "stop_string"),
        ({"stop_token_ids": tokens_of("two words ✓"), "stop": ["two words"]}, "atwo words ✓", STOP, "stop_token_id"),
    ],
)
@run_by(run)
async def test_a_resumed_output_that_was_whole_ends_at_once(
    h: Harness, *, params: dict[str, Any], output: str, reason: int, matched: str | None
) -> None:
    ids = [token for c in ("a", output[1:]) for token in tokens_of(c)]
    messages = [m async for m in h.stub.Generate(request(resumed_token_ids=ids, params=params))]
    assert [m.WhichOneof("event") for m in messages] == ["complete"]
    complete = messages[0].complete
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == (reason, matched)
    assert (complete.completion_tokens, list(complete.token_ids), complete.text) == (2, [], "")
    assert h.engine.commands == []


@pytest.mark.parametrize(
    ("params", "output", "why"),
    [
        ({"stop": ["b"]}, "abc", "stop string 'b' ends the output there"),
        ({"stop_token_ids": tokens_of("b")}, "abc", "ends the output"),
        ({}, ["a", "</s>", "c"], "ends the output"),
    ],
)
@run_by(run)
async def test_resumed_tokens_behind_an_end_are_refused(
    h: Harness, *, params: dict[str, Any], output: Sequence[str], why: str
) -> None:
    ids = [token for c in output for token in tokens_of(c)]
    with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
        [_ async for _ in h.stub.Generate(request(resumed_token_ids=ids, params=params))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "resumed_token_ids[1]: must be the last of them" in (caught.value.details() or "")
    assert h.engine.commands == []


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}])
@run_by(run)
async def test_a_resumed_output_that_was_not_whole_goes_on(h: Harness, *, params: dict[str, Any]) -> None:
    call = await h.start(request(resumed_token_ids=tokens_of("a</s>"), params=params))
    h.engine.push("r", 50, finish=FinishReason.LENGTH)
    assert (await call.read()).chunk.completion_tokens == 3


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_resumed_tokens_are_taken_in_slices(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer | None) -> None:
    """Without a tokenizer there is nothing to do for each."""
    added: list[int] = []
    add = Detokenizer.add

    def counted(self: Detokenizer, token_id: int) -> str:
        added.append(token_id)
        return add(self, token_id)

    monkeypatch.setattr(Detokenizer, "add", counted)
    resumed = tokens_of("a") * (3 * SLICE_TOKENS + 1)
    command = GenerateCommand("r", array("I", [5, *resumed]), SamplingParams(max_tokens=2000), 1, len(resumed))
    output = OutputProcessor(command, StopStrings([]), tokenizer)
    assert added == []
    taken = [len(added) for _ in output.resume(())]
    assert taken == ([SLICE_TOKENS, 2 * SLICE_TOKENS, 3 * SLICE_TOKENS] if tokenizer else [])
    assert output.num_tokens == len(resumed)


@run_by(run)
async def test_other_calls_run_between_the_slices_of_resumed_tokens(
    h: Harness, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of 16 slices has begun; 16 turns of the event loop go by before the engine knows it."""
    monkeypatch.setattr(output_processor, "SLICE_TOKENS", 2)
    turns: list[int] = []
    feed = OutputProcessor.resume

    def resume(self: OutputProcessor, eos_token_ids: Collection[int]) -> Iterator[None]:
        asyncio.get_running_loop().call_soon(turn)
        yield from feed(self, eos_token_ids)
        turns.append(-1)

    def turn() -> None:
        if turns[-1:] != [-1]:
            turns.append(1)
            asyncio.get_running_loop().call_soon(turn)

    monkeypatch.setattr(OutputProcessor, "resume", resume)
    await h.start(request(resumed_token_ids=tokens_of("a") * 33, params={"max_tokens": 50}))
    assert sum(turns[: turns.index(-1)]) >= 16
