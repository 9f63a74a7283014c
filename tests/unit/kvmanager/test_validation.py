"""Every field of GenerateRequest: what is refused and how, what is taken and with which defaults."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import small_tokenizers
from fake_engine import MODEL

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.chat_template import ChatTemplate
from pagekv.kvmanager.request import CacheIdentity, GenerateCommand, MediaSpan, SamplingParams
from pagekv.kvmanager.tokenizer import Tokenizer
from pagekv.kvmanager.validation import read_generate
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'pirate' %}{{ raise_exception('no pirates') }}{% endif %}"
    "<|user|>{{ m.content }}{% endfor %}",
    {"bos_token": "<s>"},
)
TOKENIZER = Tokenizer(small_tokenizers.byte_level(), TEMPLATE)
NO_TEMPLATE = Tokenizer(small_tokenizers.byte_level())
IDS = types_pb2.TokenizedInput(input_ids=[5, 6, 7, 8])


def read(
    request: pb.GenerateRequest, tokenizer: Tokenizer | None = TOKENIZER, **model: Any
) -> tuple[GenerateCommand, list[str]]:
    """With a pool that holds the whole context unless told otherwise."""
    return asyncio.run(read_generate(request, replace(MODEL, **{"num_device_blocks": 16, **model}), tokenizer))


def sampled(**params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokenized=IDS, sampling_params=types_pb2.SamplingParams(**params))


def beams(width: int = 4, **params: Any) -> pb.GenerateRequest:
    return sampled(beam_width=width, **params)


def cached(**controls: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokenized=IDS, cache=types_pb2.CacheControls(**controls))


def media(position: int, length: int, digest: str = "d") -> pb.GenerateRequest:
    return cached(media_hashes=[types_pb2.MediaHash(position=position, length=length, hash=digest)])


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=types_pb2.ChatInput(messages=[types_pb2.ChatMessage(role=r, content=c) for r, c in messages])
    )


def ids(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokenized=types_pb2.TokenizedInput(input_ids=token_ids), **fields)


def resumed(tokens: int, **fields: Any) -> pb.GenerateRequest:
    return ids(5, 6, 7, 8, resumed_tokens=tokens, **fields)


N2 = types_pb2.SamplingParams(n=2)
P = "sampling_params."
# Request, field path, words of the description: bounds and value.
REFUSED: list[tuple[pb.GenerateRequest, str, str]] = [
    (pb.GenerateRequest(tokenized=IDS, request_id="a b"), "request_id", "1 to 128 characters of .* got 'a b'"),
    (pb.GenerateRequest(tokenized=IDS, request_id="ä"), "request_id", "got 'ä'"),
    (pb.GenerateRequest(tokenized=IDS, request_id="a\n"), "request_id", "1 to 128"),
    (pb.GenerateRequest(tokenized=IDS, request_id="a" * 129), "request_id", r"\(129 characters\)"),
    (pb.GenerateRequest(), "input", "exactly one of text, tokenized and chat"),
    (pb.GenerateRequest(text=""), "text", "empty"),
    (pb.GenerateRequest(text="x" * (8 * 2**20 + 1)), "text", "at most 8388608 bytes .* has 8388609"),
    (pb.GenerateRequest(text="é" * (4 * 2**20 + 1)), "text", "at most 8388608 bytes .* has 8388610"),
    (pb.GenerateRequest(text="\x00" * 63), "text", r"has 64 tokens, must have from 1 to 63 \(the context has 64"),
    (ids(), "tokenized.input_ids", "at least one"),
    (ids(*[5] * 64), "tokenized.input_ids", r"has 64 tokens, must have from 1 to 63 \(the context has 64 tokens\)"),
    (ids(5, 399, 400), "tokenized.input_ids[2]", "from 0 to 399 .* got 400"),
    (ids(2**32 - 1), "tokenized.input_ids[0]", "got 4294967295"),
    (chat(), "chat.messages", "from 1 to 4096 messages, has 0"),
    (chat(*[("user", "")] * 4097), "chat.messages", "has 4097"),
    (chat(("user", "x"), ("", "y")), "chat.messages[1].role", "empty"),
    (chat(("user", "x" * 5 * 2**20), ("user", "x" * 5 * 2**20)), "chat.messages", "at most 8388608 bytes"),
    (chat(("pirate", "x")), "chat.messages", "refuses it: no pirates"),
    (chat(("user", "\x00" * 62)), "chat.messages", "has 64 tokens, must have from 1 to 63"),
    (pb.GenerateRequest(tokenized=IDS, priority=101), "priority", "from -100 to 100, got 101"),
    (pb.GenerateRequest(tokenized=IDS, priority=-101), "priority", "from -100 to 100, got -101"),
    (sampled(temperature=-0.5), P + "temperature", "from 0 to 100, got -0.5"),
    (sampled(temperature=100.5), P + "temperature", "from 0 to 100, got 100.5"),
    (sampled(temperature=math.nan), P + "temperature", "from 0 to 100, got nan"),
    (sampled(temperature=math.inf), P + "temperature", "from 0 to 100, got inf"),
    (sampled(top_p=0.0), P + "top_p", "above 0 and up to 1, got 0.0"),
    (sampled(top_p=1.5), P + "top_p", "above 0 and up to 1, got 1.5"),
    (sampled(top_p=-math.inf), P + "top_p", "got -inf"),
    (sampled(top_p=math.nan), P + "top_p", "got nan"),
    (sampled(top_k=401), P + "top_k", "from 0 to 400, got 401"),
    (sampled(min_p=-0.5), P + "min_p", "from 0 to 1, got -0.5"),
    (sampled(min_p=1.5), P + "min_p", "from 0 to 1, got 1.5"),
    (sampled(min_p=math.nan), P + "min_p", "got nan"),
    (sampled(max_tokens=0), P + "max_tokens", r"from 1 to 60 \(the context has 64 tokens, the prompt takes 4\), got 0"),
    (sampled(max_tokens=61), P + "max_tokens", "from 1 to 60 .* got 61"),
    (sampled(max_tokens=2**32 - 1), P + "max_tokens", "got 4294967295"),
    (sampled(min_tokens=17), P + "min_tokens", r"from 0 to max_tokens \(16\), got 17"),
    (sampled(min_tokens=6, max_tokens=5), P + "min_tokens", r"from 0 to max_tokens \(5\), got 6"),
    (sampled(n=0), P + "n", "from 1 to 64, got 0"),
    (sampled(n=65), P + "n", "from 1 to 64, got 65"),
    (sampled(stop=["x"] * 17), P + "stop", "at most 16 entries, has 17"),
    (sampled(stop=["ok", ""]), P + "stop[1]", "from 1 to 256 characters, has 0"),
    (sampled(stop=["x" * 257]), P + "stop[0]", "from 1 to 256 characters, has 257"),
    (sampled(stop_token_ids=[1] * 65), P + "stop_token_ids", "at most 64 entries, has 65"),
    (sampled(stop_token_ids=[399, 400]), P + "stop_token_ids[1]", "from 0 to 399 .* got 400"),
    (sampled(repetition_penalty=0.0), P + "repetition_penalty", "above 0 and up to 10, got 0.0"),
    (sampled(repetition_penalty=10.5), P + "repetition_penalty", "above 0 and up to 10, got 10.5"),
    (sampled(repetition_penalty=math.nan), P + "repetition_penalty", "got nan"),
    (sampled(presence_penalty=-2.5), P + "presence_penalty", "from -2 to 2, got -2.5"),
    (sampled(presence_penalty=math.nan), P + "presence_penalty", "got nan"),
    (sampled(frequency_penalty=2.5), P + "frequency_penalty", "from -2 to 2, got 2.5"),
    (sampled(frequency_penalty=math.inf), P + "frequency_penalty", "got inf"),
    (sampled(logprobs=21), P + "logprobs", "from 0 to 20, got 21"),
    (sampled(logit_bias={400: 1.0}), P + "logit_bias", "from 0 to 399, got 400"),
    (sampled(logit_bias={7: 100.5}), P + "logit_bias[7]", "from -100 to 100, got 100.5"),
    (sampled(logit_bias={7: math.nan}), P + "logit_bias[7]", "got nan"),
    (sampled(logit_bias=dict.fromkeys(range(1025), 1.0)), P + "logit_bias", "at most 1024 entries, has 1025"),
    (beams(33), P + "beam_width", "from 0 to 32, got 33"),
    (beams(17), P + "beam_width", "from 0 to 16 .*the pool 16 blocks.*, got 17"),
    (beams(n=5), P + "n", r"from 1 to beam_width \(4\), got 5"),
    (beams(length_penalty=10.5), P + "length_penalty", "from -10 to 10, got 10.5"),
    (beams(length_penalty=math.nan), P + "length_penalty", "from -10 to 10, got nan"),
    (sampled(length_penalty=2), P + "length_penalty", "must be absent without beam_width, got 2.0"),
    (sampled(early_stopping=True), P + "early_stopping", "must be absent without beam_width, got True"),
    (beams(temperature=0.5), P + "temperature", "must be 0 or absent with beam_width, got 0.5"),
    (beams(top_p=0.5), P + "top_p", "must be 1 or absent with beam_width, got 0.5"),
    (beams(top_k=5), P + "top_k", "must be 0 or absent with beam_width, got 5"),
    (beams(min_p=0.5), P + "min_p", "must be 0 or absent with beam_width, got 0.5"),
    (beams(repetition_penalty=1.5), P + "repetition_penalty", "must be 1 or absent with beam_width, got 1.5"),
    (beams(presence_penalty=-1), P + "presence_penalty", "must be 0 or absent with beam_width, got -1.0"),
    (beams(frequency_penalty=1), P + "frequency_penalty", "must be 0 or absent with beam_width, got 1.0"),
    (beams(seed=0), P + "seed", "must be absent with beam_width"),
    (beams(stop=["x"]), P + "stop", "must be absent with beam_width"),
    (beams(logprobs=0), P + "logprobs", "must be absent with beam_width"),
    (beams(logit_bias={1: 1.0}), P + "logit_bias", "must be absent with beam_width"),
    (
        resumed(1, sampling_params=types_pb2.SamplingParams(beam_width=2)),
        "resumed_tokens",
        "must be 0 with sampling_params.beam_width, got 1",
    ),
    (cached(namespace="é" * 129), "cache.namespace", "at most 256 bytes of UTF-8, has 258"),
    (cached(adapter_id="a" * 257), "cache.adapter_id", "at most 256 bytes of UTF-8, has 257"),
    (media(0, 1, ""), "cache.media_hashes[0].hash", "from 1 to 128 characters, has 0"),
    (media(0, 1, "h" * 129), "cache.media_hashes[0].hash", "from 1 to 128 characters, has 129"),
    (media(4, 1), "cache.media_hashes[0].position", "from 0 to 3, got 4"),
    (media(1, 0), "cache.media_hashes[0].length", "from 1 to 3, got 0"),
    (media(1, 4), "cache.media_hashes[0].length", "from 1 to 3, got 4"),
    (cached(media_hashes=[types_pb2.MediaHash()] * 257), "cache.media_hashes", "at most 256 entries, has 257"),
    (resumed(4), "resumed_tokens", r"below the number of input ids \(4\), got 4"),
    (resumed(2**32 - 1), "resumed_tokens", "got 4294967295"),
    (resumed(1, sampling_params=N2), "resumed_tokens", "must be 0 unless sampling_params.n is 1"),
    (pb.GenerateRequest(text="x", resumed_tokens=1), "resumed_tokens", "must be 0 unless the input is tokenized"),
    (resumed(3, sampling_params=types_pb2.SamplingParams(max_tokens=2)), "resumed_tokens", r"max_tokens \(2\), got 3"),
    (
        resumed(2, cache=types_pb2.CacheControls(media_hashes=[types_pb2.MediaHash(position=2, length=1, hash="h")])),
        "cache.media_hashes[0].position",
        "from 0 to 1, got 2",
    ),
]


@pytest.mark.parametrize(
    ("request_", "field", "words"), REFUSED, ids=[f"{i}-{field}" for i, (_, field, _) in enumerate(REFUSED)]
)
def test_refused(request_: pb.GenerateRequest, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read(request_)
    assert caught.value.field == field


def test_every_field_of_the_contract_is_refused_somewhere() -> None:
    """Booleans and the seed, where every value is valid, aside; and the fingerprint, which is no bad field but a
    precondition.
    """
    free = {"seed", "ignore_eos", "no_read", "no_write", "only_complete", "model_fingerprint"}
    paths = " ".join(field for _, field, _ in REFUSED).replace("[", ".").replace("]", "").replace(".", " ").split()
    messages = (pb.GenerateRequest, types_pb2.SamplingParams, types_pb2.CacheControls, types_pb2.MediaHash)
    names = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    assert names - free - {"sampling_params", "cache", "tokenized", "chat"} <= set(paths)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text="x"), "text"),
        (chat(("user", "x")), "chat"),
        (sampled(stop=["x"]), "sampling_params.stop"),
    ],
)
def test_without_a_tokenizer_only_token_ids_are_taken(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
        read(request_, None)
    assert caught.value.field == field
    assert read(ids(5, 6), None)[0].prompt_ids == [5, 6]


def test_without_a_chat_template_chat_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        read(chat(("user", "x")), NO_TEMPLATE)
    assert caught.value.field == "chat"


def test_a_tokenizer_with_more_ids_than_the_model_is_caught() -> None:
    with pytest.raises(InvalidRequest, match="from 0 to 2 "):
        asyncio.run(read_generate(pb.GenerateRequest(text="x"), replace(MODEL, vocab_size=3), TOKENIZER))


def test_defaults() -> None:
    command, stops = read(ids(5, 6, 7))
    assert stops == []
    assert command.request_id.startswith("req-")
    sampling = replace(SamplingParams(), seed=command.sampling.seed)
    expected = GenerateCommand(command.request_id, [5, 6, 7], sampling, model_fingerprint=MODEL.model_fingerprint)
    assert command == expected


def test_made_request_ids_and_seeds_differ() -> None:
    commands = [read(ids(5))[0] for _ in range(8)]
    assert len({command.request_id for command in commands}) == 8
    assert len({command.sampling.seed for command in commands}) == 8
    assert all(0 <= command.sampling.seed < 2**64 for command in commands)


def test_every_value_arrives() -> None:
    request = pb.GenerateRequest(
        request_id="A.z_9:-",
        tokenized=IDS,
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
            adapter_id="a",
            media_hashes=[types_pb2.MediaHash(position=1, length=3, hash="h")],
            no_read=True,
            no_write=True,
        ),
        priority=-100,
    )
    command, stops = read(request)
    assert stops == ["x" * 256, "y"]
    assert command == GenerateCommand(
        request_id="A.z_9:-",
        prompt_ids=[5, 6, 7, 8],
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
        identity=CacheIdentity("n" * 256, "a", (MediaSpan(1, 3, "h"),), read=False, write=False),
        priority=-100,
        model_fingerprint=MODEL.model_fingerprint,
    )


def test_every_value_of_beam_search_arrives() -> None:
    """What says no more than an absent field may be there."""
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


@pytest.mark.parametrize(
    ("request_", "model", "most"),
    [
        # 128 candidates of each beam are all there is: 64 stop tokens, one of them the model's own, and 33 more.
        (beams(29, stop_token_ids=range(64)), {"eos_token_ids": tuple(range(63, 100))}, 28),
        (beams(32, stop_token_ids=range(64)), {}, None),
        # The vocabulary must have a token for every beam besides those that end.
        (beams(10), {"vocab_size": 10}, 9),
        (beams(10, ignore_eos=True), {"vocab_size": 10}, None),
    ],
)
def test_the_beams_need_tokens_besides_those_that_end(
    request_: pb.GenerateRequest, model: dict[str, Any], most: int | None
) -> None:
    model = {"num_device_blocks": 100, **model}
    if most is None:
        read(request_, **model)
        return
    with pytest.raises(InvalidRequest, match=f"from 0 to {most} .* tokens end a hypothesis") as caught:
        read(request_, **model)
    assert caught.value.field == "sampling_params.beam_width"


LONG = types_pb2.SamplingParams(beam_width=4)


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (ids(*[5] * 41), "tokenized.input_ids", "has 41 tokens, .* from 1 to 40: 41 tokens need 11 blocks, .* has 10"),
        (pb.GenerateRequest(text="\x00" * 40), "text", "41 tokens need 11 blocks, the pool has 10"),
        (chat(("user", "\x00" * 39)), "chat.messages", "41 tokens need 11 blocks, the pool has 10"),
        (
            ids(*[5] * 9, sampling_params=LONG),
            "tokenized.input_ids",
            "to 8: 9 tokens for 4 beams need 12 blocks",
        ),
        (sampled(max_tokens=38), P + "max_tokens", "from 1 to 37, got 38: 42 tokens need 11 blocks, the pool has 10"),
        (beams(max_tokens=6), P + "max_tokens", "from 1 to 5, got 6: 10 tokens for 4 beams need 12 blocks, .* has 10"),
    ],
)
def test_what_can_never_fit_is_refused_with_needed_and_available_blocks(
    request_: pb.GenerateRequest, field: str, words: str
) -> None:
    """A context of 64 tokens and 10 blocks of 4: the last token sampled needs no slot."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        read(request_, num_device_blocks=10)
    assert caught.value.field == field


def test_what_just_fits_is_taken() -> None:
    for request in (sampled(max_tokens=37), ids(*[5] * 40), beams(max_tokens=5)):
        read(request, num_device_blocks=10)


def test_explicit_zeros_are_values_and_not_defaults() -> None:
    sampling = read(sampled(temperature=0.0, seed=0, top_k=0, min_p=0.0, min_tokens=0))[0].sampling
    assert (sampling.temperature, sampling.seed) == (0.0, 0)
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
    assert read(pb.GenerateRequest(text="void"))[0].prompt_ids == [0, *plain]
    assert read(chat(("user", "void")))[0].prompt_ids == [0, 2, *plain]


def test_resumed_tokens_may_fill_the_context() -> None:
    params = types_pb2.SamplingParams(max_tokens=60)
    command, _ = read(ids(*[5] * 64, resumed_tokens=60, sampling_params=params))
    assert (len(command.prompt_ids), command.resumed_tokens, command.sampling.max_tokens) == (64, 60, 60)


def test_long_texts_do_not_hold_up_the_event_loop() -> None:
    """A prompt of 2 MB is refused for its length in tokens, and meanwhile other tasks run."""

    async def main() -> tuple[int, float, float]:
        worst, running, ticks = 0.0, True, 0

        async def ticker() -> None:
            nonlocal worst, ticks
            while running:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                worst, ticks = max(worst, time.perf_counter() - before), ticks + 1

        task = asyncio.create_task(ticker())
        await asyncio.sleep(0)
        request = pb.GenerateRequest(text="the earth " * 200_000)
        start = time.perf_counter()
        with pytest.raises(InvalidRequest, match="must have from 1 to 63"):
            await read_generate(request, MODEL, TOKENIZER)
        elapsed = time.perf_counter() - start
        running = False
        await task
        return ticks, worst, elapsed

    ticks, worst, elapsed = asyncio.run(main())
    assert ticks > 20
    # Held up, it would be for all of the time that encoding takes.
    assert worst < elapsed / 2


def test_huge_lists_of_ids_are_refused_by_their_number_alone() -> None:
    request = ids(*[2**32 - 1] * 2_000_000)
    start = time.perf_counter()
    with pytest.raises(InvalidRequest, match="has 2000000 tokens"):
        read(request)
    assert time.perf_counter() - start < 0.5
