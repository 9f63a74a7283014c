"""The meaning of an accepted GenerateRequest: every value and every default."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from support.engine.fake_engine import MODEL
from support.engine.generate_requests import (
    IDS,
    TOKENIZER,
    beams,
    chat,
    ids,
    read,
    resumed,
    sampled,
)
from support.prompts import as_chat, as_prompt

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


def test_defaults() -> None:
    command, stops = read(ids(5, 6, 7))
    assert stops == []
    assert command.request_id.startswith("req-")
    sampling = replace(SamplingParams(), seed=command.sampling.seed)
    expected = GenerateCommand(
        command.request_id, array("I", [5, 6, 7]), sampling, model_fingerprint=MODEL.model_fingerprint
    )
    assert command == expected


def test_made_request_ids_and_seeds_differ() -> None:
    commands = [read(ids(5))[0] for _ in range(8)]
    assert len({command.request_id for command in commands}) == 8
    assert len({command.sampling.seed for command in commands}) == 8
    assert all(0 <= command.sampling.seed < 2**64 for command in commands)


def test_every_value_arrives() -> None:
    request = pb.GenerateRequest(
        request_id="A.z_9:-",
        prompt=IDS,
        sampling_params=types_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=400,
            min_p=0.125,
            max_tokens=60,
            min_tokens=60,
            n=64,
            seed=2**64 - 1,
            stop=["x" * 256, "y"],
            stop_token_ids=[399],
            ignore_eos=True,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            logprobs=0,
            logit_bias={3: -100, 4: 100},
        ),
        cache=types_pb2.CacheControls(
            namespace="n" * 256,
            read=False,
            write=False,
        ),
        priority=-100,
    )
    command, stops = read(request)
    assert stops == ["x" * 256, "y"]
    assert command == GenerateCommand(
        request_id="A.z_9:-",
        prompt_ids=array("I", [5, 6, 7, 8]),
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=400,
            min_p=0.125,
            max_tokens=60,
            min_tokens=60,
            seed=2**64 - 1,
            stop_token_ids=(399,),
            ignore_eos=True,
            repetition_penalty=1.5,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logprobs=0,
            logit_bias={3: -100.0, 4: 100.0},
        ),
        n=64,
        identity=CacheIdentity("n" * 256, read=False, write=False),
        priority=-100,
        model_fingerprint=MODEL.model_fingerprint,
    )


def test_every_value_of_beam_search_arrives() -> None:
    """A value that says no more than an absent field may be there."""
    request = beams(
        8,
        n=8,
        length_penalty=-10,
        early_stopping=True,
        stop_token_ids=[7],
        ignore_eos=True,
        max_tokens=4,
        min_tokens=2,
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
    )
    command, stops = read(request)
    assert (command.n, stops) == (8, [])
    assert command.sampling == SamplingParams(
        temperature=0.0,
        max_tokens=4,
        min_tokens=2,
        seed=command.sampling.seed,
        stop_token_ids=(7,),
        ignore_eos=True,
        beam_width=8,
        length_penalty=-10.0,
        early_stopping=True,
    )


def test_beam_search_by_default() -> None:
    command, _ = read(beams(), num_device_blocks=100)
    assert command.n == 1
    assert command.sampling == replace(SamplingParams(), temperature=0.0, seed=command.sampling.seed, beam_width=4)


def test_a_beam_width_of_zero_is_none() -> None:
    command, _ = read(beams(0, temperature=0.5, seed=3, length_penalty=1, early_stopping=False))
    assert command.sampling == replace(SamplingParams(), temperature=0.5, seed=3)


def test_what_just_fits_is_taken() -> None:
    for request in (sampled(max_tokens=37), ids(*[5] * 40), beams(max_tokens=5)):
        read(request, num_device_blocks=10)


def test_explicit_zeros_are_values_and_not_defaults() -> None:
    sampling = read(sampled(temperature=0.0, seed=0, top_k=0, min_p=0.0, min_tokens=0))[0].sampling
    assert (sampling.temperature, sampling.seed) == (0.0, 0)
    # As float32 has it.
    smallest = read(sampled(repetition_penalty=0.001))[0].sampling.repetition_penalty
    assert smallest == pytest.approx(0.001)
    assert read(sampled())[0].sampling.logprobs is None
    assert read(sampled(logprobs=0))[0].sampling.logprobs == 0


@pytest.mark.parametrize(
    ("request_", "max_tokens"),
    [
        (ids(5), 16),
        (ids(*[5] * 50), 14),
        (ids(*[5] * 63), 1),
        (chat(("user", "\x00")), 61),
        (resumed(2), 16),
    ],
)
def test_max_tokens_when_absent(request_: pb.GenerateRequest, max_tokens: int) -> None:
    assert read(request_)[0].sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("request_", "max_tokens"), [(ids(5), 16), (ids(*[5] * 30), 11), (ids(*[5] * 40), 1), (chat(("user", "")), 39)]
)
def test_max_tokens_when_absent_and_the_pool_is_smaller_than_the_context(
    request_: pb.GenerateRequest, max_tokens: int
) -> None:
    """10 blocks of 4 hold 40 computed tokens, and one more is sampled."""
    assert read(request_, num_device_blocks=10)[0].sampling.max_tokens == max_tokens


def test_text_gets_the_tokenizers_special_tokens_and_chat_the_templates() -> None:
    plain = TOKENIZER.encode("void", special_tokens=False, limit=9)
    assert list(read(pb.GenerateRequest(prompt=as_prompt("void")))[0].prompt_ids) == [0, *plain]
    assert list(read(chat(("user", "void")))[0].prompt_ids) == [0, 2, *plain]


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [(as_prompt("void"), 16), (as_prompt([5, 6]), 16), (as_chat(("user", "void")), None)]
)
def test_resumed_tokens_follow_a_prompt_of_any_kind_and_change_no_default(
    prompt: types_pb2.Prompt, max_tokens: int | None
) -> None:
    fresh, _ = read(pb.GenerateRequest(prompt=prompt))
    again, _ = read(pb.GenerateRequest(prompt=prompt, resumed_token_ids=[7, 8, 9]))
    assert (list(again.prompt_ids), again.resumed_tokens) == ([*fresh.prompt_ids, 7, 8, 9], 3)
    assert again.sampling.max_tokens == fresh.sampling.max_tokens == (max_tokens or 64 - len(fresh.prompt_ids))


def test_resumed_tokens_may_fill_the_context() -> None:
    params = types_pb2.SamplingParams(max_tokens=60)
    command, _ = read(ids(*[5] * 4, resumed_token_ids=[6] * 60, sampling_params=params))
    assert list(command.prompt_ids) == [5] * 4 + [6] * 60
    assert (len(command.prompt_ids), command.resumed_tokens, command.sampling.max_tokens) == (64, 60, 60)
