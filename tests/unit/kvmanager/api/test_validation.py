"""Every field of GenerateRequest: what is refused and how."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from support.engine.fake_engine import MODEL
from support.engine.generate_requests import (
    IDS,
    beams,
    cached,
    chat,
    ids,
    media,
    read,
    resumed,
    sampled,
)
from support.prompts import as_prompt

from pagekv.common.errors import InvalidRequest, NotFound
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

N2 = types_pb2.SamplingParams(n=2)
P = "sampling_params."
# Request, field path, words of the description: bounds and value.
REFUSED: list[tuple[pb.GenerateRequest, str, str]] = [
    (pb.GenerateRequest(prompt=IDS, request_id="a b"), "request_id", "1 to 128 characters of .* got 'a b'"),
    (pb.GenerateRequest(prompt=IDS, request_id="ä"), "request_id", "got 'ä'"),
    (pb.GenerateRequest(prompt=IDS, request_id="a\n"), "request_id", "1 to 128"),
    (pb.GenerateRequest(prompt=IDS, request_id="a" * 129), "request_id", r"\(129 characters\)"),
    (pb.GenerateRequest(), "prompt", "exactly one of text, token_ids and chat"),
    (pb.GenerateRequest(prompt=as_prompt("")), "prompt.text", "empty"),
    (
        pb.GenerateRequest(prompt=as_prompt("x" * 2017)),
        "prompt.text",
        r"at most 2016 bytes of UTF-8 \(32 for each of 63 tokens, the context has 64 tokens\), has 2017",
    ),
    (pb.GenerateRequest(prompt=as_prompt("é" * 1009)), "prompt.text", "at most 2016 bytes .* has 2018"),
    (
        pb.GenerateRequest(prompt=as_prompt("\x00" * 63)),
        "prompt.text",
        r"has 64 tokens, must have from 1 to 63 \(the context has 64",
    ),
    (ids(), "prompt.token_ids.ids", "at least one"),
    (ids(*[5] * 64), "prompt.token_ids.ids", r"has 64 tokens, must have from 1 to 63 \(the context has 64 tokens\)"),
    (ids(5, 399, 400), "prompt.token_ids.ids[2]", "from 0 to 399 .* got 400"),
    (ids(2**32 - 1), "prompt.token_ids.ids[0]", "got 4294967295"),
    (chat(), "prompt.chat.messages", "from 1 to 4096 messages, has 0"),
    (chat(*[("user", "")] * 4097), "prompt.chat.messages", "has 4097"),
    (chat(("user", "x"), ("", "y")), "prompt.chat.messages[1].role", "empty"),
    (chat(("user", "x" * 1500), ("user", "x" * 1500)), "prompt.chat.messages", "at most 2016 bytes .* has 3008"),
    (
        chat(("user", "x" * 2012)),
        "prompt.chat.messages",
        "at most 2016 bytes .* rendered with the chat template has 2023",
    ),
    (chat(("pirate", "x")), "prompt.chat.messages", "refuses it: no pirates"),
    (chat(("user", "\x00" * 62)), "prompt.chat.messages", "has 64 tokens, must have from 1 to 63"),
    (pb.GenerateRequest(prompt=IDS, priority=101), "priority", "from -100 to 100, got 101"),
    (pb.GenerateRequest(prompt=IDS, priority=-101), "priority", "from -100 to 100, got -101"),
    (sampled(temperature=-0.5), P + "temperature", "from 0 to 100, got -0.5"),
    (sampled(temperature=100.5), P + "temperature", "from 0 to 100, got 100.5"),
    (sampled(temperature=math.nan), P + "temperature", "from 0 to 100, got nan"),
    (sampled(temperature=math.inf), P + "temperature", "from 0 to 100, got inf"),
    (sampled(top_p=0.0), P + "top_p", "above 0 and up to 1, got 0.0"),
    (sampled(top_p=1.5), P + "top_p", "above 0 and up to 1, got 1.5"),
    (sampled(top_p=1.1), P + "top_p", "got 1.1$"),
    (sampled(top_p=1.0000001), P + "top_p", "got 1.0000001$"),
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
    (sampled(repetition_penalty=0.0), P + "repetition_penalty", "from 0.001 to 10, got 0.0"),
    (sampled(repetition_penalty=1e-38), P + "repetition_penalty", "from 0.001 to 10, got 1e-38$"),
    (sampled(repetition_penalty=10.5), P + "repetition_penalty", "from 0.001 to 10, got 10.5"),
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
        "resumed_token_ids",
        "must be empty with sampling_params.beam_width of 2, has 1 ids",
    ),
    (cached(namespace="é" * 129), "cache.namespace", "at most 256 bytes of UTF-8, has 258"),
    (ids(5, adapter="a" * 257), "adapter", "at most 256 bytes of UTF-8, has 257"),
    (media(1, 2), "cache.media_hashes", "must be empty: the model takes no media, has 1 entries"),
    (resumed(17), "resumed_token_ids", r"at most max_tokens \(16\), has 17"),
    (resumed(1, sampling_params=N2), "resumed_token_ids", "must be empty with sampling_params.n of 2, has 1 ids"),
    (resumed(64), "resumed_token_ids", "at most 63 entries, has 64"),
    (ids(5, resumed_token_ids=[7, 400]), "resumed_token_ids[1]", "from 0 to 399 .* got 400"),
    (
        resumed(3, sampling_params=types_pb2.SamplingParams(max_tokens=2)),
        "resumed_token_ids",
        r"at most max_tokens \(2\), has 3",
    ),
]


@pytest.mark.parametrize(
    ("request_", "field", "words"), REFUSED, ids=[f"{i}-{field}" for i, (_, field, _) in enumerate(REFUSED)]
)
def test_refused(request_: pb.GenerateRequest, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read(request_)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "request_",
    [pb.GenerateRequest(prompt=as_prompt("é" * 2_000_001)), chat(*[("user", "x" * 999_998)] * 4)],
    ids=["text", "chat"],
)
def test_text_is_refused_by_its_bytes_however_long_the_context(request_: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match=r"at most 4000000 bytes of UTF-8 \(4 MB\), has 40000(02|08)"):
        read(request_, max_model_len=2**20)


def test_an_adapter_is_looked_for_and_not_found() -> None:
    """The base model must not answer in its place."""
    with pytest.raises(NotFound, match="adapter: there is no 'lora', the model has no adapters") as caught:
        read(ids(5, adapter="lora"))
    assert (caught.value.kind, caught.value.name) == ("adapter", "lora")


def test_every_field_of_the_contract_is_refused_somewhere() -> None:
    """Booleans and the seed, where every value is valid, aside; and the fingerprint, which is no bad field but a
    precondition.
    """
    free = {"seed", "ignore_eos", "read", "write", "only_complete", "model_fingerprint"}
    paths = " ".join(field for _, field, _ in REFUSED).replace("[", ".").replace("]", "").replace(".", " ").split()
    messages = (pb.GenerateRequest, types_pb2.SamplingParams, types_pb2.CacheControls)
    names = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    assert names - free - {"sampling_params", "cache"} <= set(paths)


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
        (ids(*[5] * 41), "prompt.token_ids.ids", "has 41 tokens, .* from 1 to 40: 41 tokens need 11 blocks, .* has 10"),
        (pb.GenerateRequest(prompt=as_prompt("\x00" * 40)), "prompt.text", "41 tokens need 11 blocks, the pool has 10"),
        (chat(("user", "\x00" * 39)), "prompt.chat.messages", "41 tokens need 11 blocks, the pool has 10"),
        (
            ids(*[5] * 9, sampling_params=LONG),
            "prompt.token_ids.ids",
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


@pytest.mark.parametrize("seed", range(40))
def test_the_first_end_within_resumed_tokens_is_found(seed: int) -> None:
    """Against a plain loop, in a few vector operations."""
    chance = random.Random(seed)
    tokens = [chance.randrange(30) for _ in range(chance.randrange(1, 20))]
    params = types_pb2.SamplingParams(
        max_tokens=30, min_tokens=chance.randrange(8), stop_token_ids=[chance.randrange(400) for _ in range(seed % 4)]
    )
    params.ignore_eos = bool(seed % 3)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else MODEL.eos_token_ids)}
    found = [at for at in range(max(0, params.min_tokens - 1), len(tokens) - 1) if tokens[at] in ends]
    request = ids(5, resumed_token_ids=tokens, sampling_params=params)
    if found:
        with pytest.raises(InvalidRequest, match=f"{len(tokens)} were given") as refused:
            read(request)
        assert refused.value.field == f"resumed_token_ids[{found[0]}]"
    else:
        assert list(read(request)[0].prompt_ids) == [5, *tokens]
