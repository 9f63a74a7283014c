"""Turns a GenerateRequest into a GenerateCommand and checks every field; a refusal names field and bounds."""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pagekv.common.errors import FailedPrecondition, InvalidRequest, NotFound
from pagekv.kvmanager.api.prompt_reader import PROMPT_FIELDS, PromptReader, check_token_ids, token_array
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.engine.capacity import check_output_fits, check_prompt_fits, longest_sequence
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.beam_search import MAX_CANDIDATES
from pagekv.kvmanager.tenants.asking import Asking
from pagekv.kvmanager.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagekv.v1 import inference_service_pb2, types_pb2
    from pagekv.v1.cache_service_pb2 import ExplainPrefixRequest, LookupPrefixRequest, PinPrefixRequest

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_N = 64
MAX_ABORT_IDS = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_PRIORITY = 100
MAX_NAME_BYTES = 256
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10
DEFAULT_MAX_TOKENS = 16
# Bounds of numbers that do not depend on other fields or the model. With these bounds a logit that is divided by a
# repetition penalty stays finite in float32.
_BOUNDS: dict[str, tuple[float, float]] = {
    "beam_width": (0, MAX_BEAM_WIDTH),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.001, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, MAX_LOGPROBS),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
}
# Parameters whose lower bound itself is not allowed.
_ABOVE = ("top_p",)
# Parameters that have no effect in beam search: those of _BEAM_NEUTRAL must be absent or have the value of _GREEDY,
# those of _BEAM_ABSENT must be absent.
_GREEDY = SamplingParams(temperature=0.0)
_BEAM_NEUTRAL = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip  # several entries a line
_BEAM_ABSENT = ("seed", "stop", "logprobs", "logit_bias")


async def read_generate(
    request: inference_service_pb2.GenerateRequest,
    served: Served,
    trace_parent: str,
    *,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> tuple[GenerateCommand, list[str]]:
    """The command for the engine, and the stop strings, which the API layer looks for. `trace_parent` as in
    `GenerateCommand`; `default_max_tokens`: for a prompt that is no conversation, or the room if that is less. Raises
    InvalidRequest, NotFound for an adapter, FailedPrecondition if the request is for another model, PermissionDenied if
    the tenant may not ask for this, and Overloaded if it has sent too much text.

    Cheap checks come first, so that a request with a wrong field is refused before its text is encoded.
    """
    model, tokenizer, asking = served.model, served.tokenizer, served.asking
    if request.model_fingerprint not in ("", model.model_fingerprint):
        raise FailedPrecondition(
            f"model_fingerprint: the model served is {model.model_fingerprint}, not {request.model_fingerprint[:64]}",
            "MODEL_FINGERPRINT",
            model.model_fingerprint,
        )
    request_id = request.request_id or f"req-{secrets.token_hex(12)}"
    check_request_id("request_id", request_id)
    _check("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    asking.check_priority(request.priority)
    params = request.sampling_params
    n = params.n if params.HasField("n") else 1
    _check("sampling_params.n", n, 1, MAX_N)
    sampling = _read_sampling(params, model.vocab_size)
    _check_beams(params, sampling, n, model)
    stops = _read_stops(params, tokenizer)
    resumed = _read_resumed(request.resumed_token_ids, sampling, n, model)
    identity = _read_identity(request, asking)

    count_text(request.prompt, asking)
    # A prompt has to leave room for at least one output token.
    limit = model.max_model_len - 1
    prompt = await PromptReader(tokenizer, model.vocab_size, limit, _context(model)).read(request.prompt)
    max_tokens = _read_max_tokens(request, len(prompt), model, default_max_tokens)
    if len(resumed) > max_tokens:
        raise InvalidRequest("resumed_token_ids", f"must have at most max_tokens ({max_tokens}), has {len(resumed)}")
    position = _first_end(resumed[:-1], max(0, params.min_tokens - 1), sampling.end_ids(model.eos_token_ids))
    if position >= 0:
        words = f"must be the last of them, since {resumed[position]} ends the output; {len(resumed)} were given"
        raise InvalidRequest(f"resumed_token_ids[{position}]", words)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling_params.min_tokens", f"must be from 0 to max_tokens ({max_tokens}), got {params.min_tokens}"
        )
    # In place, because copying a million ids takes milliseconds.
    prompt.extend(resumed)
    command = GenerateCommand(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=replace(sampling, max_tokens=max_tokens, min_tokens=params.min_tokens),
        n=n,
        resumed_tokens=len(resumed),
        identity=identity,
        priority=request.priority,
        model_fingerprint=model.model_fingerprint,
        trace_parent=trace_parent,
        tenant=asking.tenant,
    )
    return command, stops


def _read_max_tokens(
    request: inference_service_pb2.GenerateRequest, num_prompt: int, model: EngineInfo, default: int
) -> int:
    """Most output tokens after a prompt of `num_prompt` tokens, which has to leave room for at least one."""
    kind, params = request.prompt.WhichOneof("kind"), request.sampling_params
    assert kind is not None, "a request without a prompt was refused"
    check_prompt_fits(PROMPT_FIELDS[kind], num_prompt, params.beam_width, model)
    if not params.HasField("max_tokens"):
        left = longest_sequence(model, params.beam_width) - num_prompt
        return left if kind == "chat" else min(default, left)
    max_tokens, left = params.max_tokens, model.max_model_len - num_prompt
    if not 1 <= max_tokens <= left:
        raise InvalidRequest(
            "sampling_params.max_tokens",
            f"must be from 1 to {left} ({_context(model)}, the prompt takes {num_prompt}), got {max_tokens}",
        )
    check_output_fits(num_prompt, max_tokens, params.beam_width, model)
    return max_tokens


async def read_lookup(
    request: LookupPrefixRequest | ExplainPrefixRequest | PinPrefixRequest, served: Served
) -> tuple[array[int], CacheIdentity]:
    """Token ids and cache identity of a lookup's or a pin's prompt. Raises InvalidRequest, NotFound, PermissionDenied,
    Overloaded.
    """
    for field in ("read", "write"):
        if request.cache.HasField(field):
            raise InvalidRequest(f"cache.{field}", "must be absent: only Generate reads and writes the cache")
    # Lookups are about blocks that the caller may read.
    identity, model = _read_identity(request, served.asking, read=True), served.model
    count_text(request.prompt, served.asking)
    prompt = await PromptReader(served.tokenizer, model.vocab_size, model.max_model_len, _context(model)).read(
        request.prompt
    )
    return prompt, identity


def count_text(prompt: types_pb2.Prompt, asking: Asking) -> None:
    """Counts the bytes of a prompt that has to be tokenised. Raises Overloaded if the tenant has sent too many."""
    if prompt.WhichOneof("kind") in ("text", "chat"):
        asking.check_text(prompt.ByteSize())


def check_request_id(field: str, request_id: str) -> None:
    """Raises InvalidRequest unless `request_id` has the form of a request id, which names of pins have, too."""
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(field, f"must be 1 to 128 characters of [A-Za-z0-9._:-], got {_quote(request_id)}")


def read_abort_ids(request_ids: Sequence[str]) -> list[str]:
    """The ids of an Abort call, each once. Raises InvalidRequest."""
    if not 1 <= len(request_ids) <= MAX_ABORT_IDS:
        raise InvalidRequest("request_ids", f"must have from 1 to {MAX_ABORT_IDS} ids, has {len(request_ids)}")
    for index, request_id in enumerate(request_ids):
        check_request_id(f"request_ids[{index}]", request_id)
    return list(dict.fromkeys(request_ids))


def _context(model: EngineInfo) -> str:
    return f"the context has {model.max_model_len} tokens"


def _read_sampling(params: types_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """All parameters but max_tokens and min_tokens, whose bounds depend on the prompt."""
    check_sampling_lists(params)
    elsewhere = ("n", "stop", "max_tokens", "min_tokens")
    found = ((descriptor.name, value) for descriptor, value in params.ListFields())
    given: dict[str, Any] = {name: value for name, value in found if name not in elsewhere}
    for name, (low, high) in (_BOUNDS | {"top_k": (0, vocab_size)}).items():
        if name in given:
            _check(f"sampling_params.{name}", given[name], low, high, above=name in _ABOVE)
    given["stop_token_ids"] = _read_stop_token_ids(params, vocab_size)
    given["logit_bias"] = _read_logit_bias(params, vocab_size)
    given.setdefault("temperature", 0.0 if params.beam_width else 1.0)
    given.setdefault("seed", secrets.randbits(64))
    return SamplingParams(**given)


def _read_resumed(given: Sequence[int], sampling: SamplingParams, n: int, model: EngineInfo) -> array[int]:
    """The resumed tokens. Their number is checked a second time when max_tokens is known."""
    field = "resumed_token_ids"
    if given and (n != 1 or sampling.beam_width):
        name, value = ("beam_width", sampling.beam_width) if sampling.beam_width else ("n", n)
        raise InvalidRequest(field, f"must be empty with sampling_params.{name} of {value}, has {len(given)} ids")
    check_count(field, len(given), model.max_model_len - 1)
    resumed = token_array(given)
    if resumed:
        check_token_ids(field, resumed, model.vocab_size)
    return resumed


def _first_end(token_ids: array[int], start: int, ends: Collection[int]) -> int:
    """The first position from `start` on with one of the tokens `ends`; -1 for none. Fast for many token ids."""
    if start >= len(token_ids):
        return -1
    found = np.isin(np.frombuffer(token_ids, np.uint32)[start:], [*ends])
    return start + int(found.argmax()) if found.any() else -1


def _check_beams(params: types_pb2.SamplingParams, sampling: SamplingParams, n: int, model: EngineInfo) -> None:
    """Refuses a beam search that cannot be run, and fields that would be ignored with or without beam search."""
    width = sampling.beam_width
    if not width:
        for name in ("length_penalty", "early_stopping"):
            if (value := getattr(sampling, name)) != getattr(_GREEDY, name):
                raise InvalidRequest(
                    f"sampling_params.{name}", f"must be absent without beam_width, got {_shown(value)}"
                )
        return
    num_ends = len(sampling.end_ids(model.eos_token_ids))
    most = min(MAX_BEAM_WIDTH, MAX_CANDIDATES - num_ends, model.vocab_size - num_ends, model.num_device_blocks)
    if width > most:
        raise InvalidRequest(
            "sampling_params.beam_width",
            f"must be from 0 to {most} ({num_ends} tokens end a hypothesis, the vocabulary has {model.vocab_size}, "
            f"the pool {model.num_device_blocks} blocks), got {width}",
        )
    if n > width:
        raise InvalidRequest("sampling_params.n", f"must be from 1 to beam_width ({width}), got {n}")
    for name in _BEAM_NEUTRAL:
        value, neutral = getattr(sampling, name), getattr(_GREEDY, name)
        if value != neutral:
            raise InvalidRequest(
                f"sampling_params.{name}", f"must be {neutral:g} or absent with beam_width, got {_shown(value)}"
            )
    for descriptor, _ in params.ListFields():
        if descriptor.name in _BEAM_ABSENT:
            raise InvalidRequest(f"sampling_params.{descriptor.name}", "must be absent with beam_width")


def _read_stop_token_ids(params: types_pb2.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    field = "sampling_params.stop_token_ids"
    if params.stop_token_ids:
        check_token_ids(field, token_array(params.stop_token_ids), vocab_size)
    return tuple(params.stop_token_ids)


def _read_stops(params: types_pb2.SamplingParams, tokenizer: Tokenizer | None) -> list[str]:
    for index, stop in enumerate(params.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            words = f"must be from 1 to {MAX_STOP_CHARACTERS} characters, has {len(stop)}"
            raise InvalidRequest(f"sampling_params.stop[{index}]", words)
    if params.stop and tokenizer is None:
        raise InvalidRequest("sampling_params.stop", "this deployment has no tokenizer; use stop_token_ids")
    return list(params.stop)


def _read_logit_bias(params: types_pb2.SamplingParams, vocab_size: int) -> dict[int, float]:
    field = "sampling_params.logit_bias"
    for token_id, bias in params.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidRequest(field, f"token ids must be from 0 to {vocab_size - 1}, got {token_id}")
        _check(f"{field}[{token_id}]", bias, -100, 100)
    return dict(params.logit_bias)


def _read_identity(
    request: inference_service_pb2.GenerateRequest | LookupPrefixRequest | ExplainPrefixRequest | PinPrefixRequest,
    asking: Asking,
    read: bool | None = None,
) -> CacheIdentity:
    """The cache identity of a request. Refuses adapters and media, because no model supports them yet and an answer of
    the base model would be wrong.
    """
    cache = request.cache
    for field, value in (("cache.namespace", cache.namespace), ("adapter", request.adapter)):
        size = len(value.encode())
        if size > MAX_NAME_BYTES:
            raise InvalidRequest(field, f"must be at most {MAX_NAME_BYTES} bytes of UTF-8, has {size}")
    if cache.media_hashes:
        raise InvalidRequest(
            "cache.media_hashes", f"must be empty: the model takes no media, has {len(cache.media_hashes)} entries"
        )
    check_adapter(request.adapter, asking)
    if cache.HasField("read"):
        read = cache.read
    write = cache.write if cache.HasField("write") else None
    return asking.cache_identity(cache.namespace, read, write)


def check_adapter(name: str, asking: Asking) -> None:
    """Raises PermissionDenied for an adapter that the tenant may not use, and NotFound for any other; "" means none."""
    asking.check_adapter(name)
    if name:
        raise NotFound(f"adapter: there is no {_quote(name)}, the model has no adapters", "adapter", name)


def _check(field: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Refuses values outside [low, high], or (low, high] if `above`; NaN and infinities are outside."""
    if not low <= value <= high or (above and value == low):
        bounds = f"above {low:g} and up to {high:g}" if above else f"from {low} to {high}"
        raise InvalidRequest(field, f"must be {bounds}, got {_shown(value)}")


def _shown(value: float) -> str:
    """A value with the digits that its sender wrote: numbers that are not whole arrive in float32."""
    return str(value if isinstance(value, int) else np.float32(value))


def check_sampling_lists(params: types_pb2.SamplingParams) -> None:
    """Raises InvalidRequest where a list of the sampling parameters has too many entries."""
    for name, entries, most in (
        ("stop", params.stop, MAX_STOPS),
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", params.logit_bias, MAX_LOGIT_BIASES),
    ):
        check_count(f"sampling_params.{name}", len(entries), most)


def check_count(field: str, count: int, most: int) -> None:
    """Raises InvalidRequest unless a list has at most so many entries."""
    if count > most:
        raise InvalidRequest(field, f"must have at most {most} entries, has {count}")


def _quote(text: str) -> str:
    return repr(text) if len(text) <= 64 else f"{text[:64]!r}... ({len(text)} characters)"
