"""Messages made from their descriptors: mostly such as a server takes, because values come from a table by the names of
fields, and some with a wild field, or of wild bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from support.fuzz.mutations import hostile, mutate, scalar

from pagekv.executor.backend.interface import LAYOUT
from pagekv.executor.session.attach_check import CONTRACT_REVISION

# Of the demo model.
VOCAB = 4096
# Bytes of a message that grows on purpose: mostly, and now and then.
USUAL_BYTES, MOST_BYTES = 16 * 2**10, 2 * 2**20
# How often a field is set that may be left out.
SET = 0.12
WORDS = ("In the beginning", "God", "created", "ä heaven \U0001f600", "and the earth.", "\n", "</s>", "word " * 60)
SERVICES = ("", "pagekv.v1.InferenceService", "pagekv.steps.v1.ExecutorService", "grpc.health.v1.Health", "nobody")

Maker = Callable[[random.Random], Any]


def _one_of(*values: Any) -> Maker:
    return lambda rng: rng.choice(values)


def _list(maker: Maker, *lengths: int) -> Maker:
    return lambda rng: [maker(rng) for _ in range(rng.choice(lengths))]


def _token(rng: random.Random) -> int:
    return rng.randrange(1, VOCAB)


def _prompt_ids(rng: random.Random) -> list[int]:
    """Beginnings that others share, and ends that nobody does."""
    common = [1 + n * 7 % 500 for n in range(rng.choice([0, 0, 16, 40, 300]))]
    return [*common, *(_token(rng) for _ in range(rng.choice([1, 3, 17, 60])))]


_name = _one_of(*(f"fuzz-{n}" for n in range(16)))
_text: Maker = lambda rng: " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 2, 5, 20])))  # noqa: E731  # as the others

# By the name of a field, or of message and field. None: the field is left out, though it is no bound that forbids it.
VALUES: dict[str, Maker | None] = {
    "request_id": _one_of("", "", *(f"fuzz-{n}" for n in range(16))),
    "request_ids": _list(_name, 1, 3, 16),
    "pin_id": _name,
    "text": _text,
    "content": _text,
    "original_text": _text,
    "role": _one_of("user", "assistant", "system"),
    "messages": None,
    "ids": _prompt_ids,
    "input_ids": _prompt_ids,
    "DetokenizeRequest.token_ids": _prompt_ids,
    "resumed_token_ids": _list(_token, 1, 3),
    "temperature": _one_of(0.0, 0.0, 0.7, 1.0),
    "top_p": _one_of(1.0, 0.9),
    "top_k": _one_of(0, 1, 40),
    "min_p": _one_of(0.0, 0.05),
    "max_tokens": _one_of(1, 2, 8, 30, 200),
    "min_tokens": _one_of(0, 1),
    "n": _one_of(1, 1, 2, 5, 64),
    "seed": lambda rng: rng.randrange(2**31),
    "stop": _list(_one_of("the", "\n", "ä", "\U0001f600"), 1, 3),
    "stop_token_ids": _list(_token, 1, 5),
    "repetition_penalty": _one_of(1.0),
    "presence_penalty": _one_of(0.0),
    "frequency_penalty": _one_of(0.0),
    "logprobs": _one_of(0, 1, 20),
    "logit_bias": None,
    "beam_width": _one_of(0, 2, 4),
    "length_penalty": _one_of(1.0),
    "early_stopping": _one_of(False),
    "namespace": _one_of("", "a", "b"),
    "media_hashes": None,
    "CacheControls.read": None,
    "CacheControls.write": None,
    "priority": _one_of(-100, 0, 1, 100),
    "model_fingerprint": None,
    "adapter": None,
    "page_size": _one_of(0, 1, 7, 100, 4096),
    "page_token": None,
    "lease_seconds": _one_of(1, 2),
    "force": _one_of(False, False, True),
    "start_revision": None,
    "instance_id": None,
    "seconds": _one_of(1, 2),
    "nanos": _one_of(0),
    # Between the processes.
    "block_size": _one_of(1, 4, 16),
    "token_budget": _one_of(1, 16, 512),
    "contract_revision": _one_of(CONTRACT_REVISION),
    "manager_id": _one_of("fuzz", "rival"),
    "num_device_blocks": _one_of(1, 8, 32),
    "num_host_blocks": _one_of(0),
    "layout": _one_of(LAYOUT),
    "take_over": None,
    "required_features": _list(_one_of(1, 2, 4), 0, 1),
    # The gateway's.
    "tokenized": None,
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "prompt_logprobs": None,
    "include_stop_str_in_output": None,
    "truncate_prompt_tokens": None,
    "grammar_from_first_token": None,
    "constraint": None,
    "kv_transfer_params": None,
    "mm_inputs": None,
    "extra_mm_inputs": None,
    "kv_transfer_params_json": None,
    "data_parallel_rank": None,
    "media_refs": None,
    "timeout_s": _one_of(0.0, 0.02),
    # gRPC's own.
    "service": _one_of(*SERVICES),
    "file_by_filename": _one_of("pagekv/v1/types.proto", "pagekv/steps/v1/executor_service.proto", "no.proto"),
    "file_containing_symbol": _one_of(*SERVICES, "pagekv.v1.Prompt", "google.protobuf.Duration"),
    "all_extension_numbers_of_type": _one_of(*SERVICES, "pagekv.v1.Prompt"),
    "containing_type": _one_of(*SERVICES),
}
# Fields that a message is refused without.
REQUIRED = {
    *("prompt", "kind", "ids", "tokenized", "messages", "role", "seconds", "lease_seconds", "request_ids", "pin_id"),
    *("block_size", "token_budget", "contract_revision", "manager_id", "num_device_blocks", "layout", "input"),
    *("sampling_params", "message_request", "GetBlockTableRequest.request_id", "input_ids", "text"),
    *("vllm.grpc.engine.top_p", "vllm.grpc.engine.n", "vllm.grpc.engine.repetition_penalty"),
    *("vllm.grpc.engine.skip_special_tokens", "vllm.grpc.engine.spaces_between_special_tokens", "max_tokens"),
}


def lawful(rng: random.Random, descriptor: Any) -> Message:
    """A message of this type with values of the tables, which a server most often takes."""
    message: Message = message_factory.GetMessageClass(descriptor)()
    chosen = {group.name: rng.choice(list(group.fields)).name for group in descriptor.oneofs}
    for field in descriptor.fields:
        group = field.containing_oneof
        # An optional field is alone in a group of its own.
        if group is not None and len(group.fields) > 1:
            wanted = chosen[group.name] == field.name and _wanted(rng, group)
        else:
            wanted = _wanted(rng, field)
        if wanted:
            _set(rng, message, field)
    return message


def _wanted(rng: random.Random, field: Any) -> bool:
    """Whether a field, or one of a group, is to be set."""
    owner, package = field.containing_type, field.containing_type.file.package
    names = {field.name, f"{owner.name}.{field.name}", f"{package}.{field.name}"}
    if names & REQUIRED:
        return True
    return not any(VALUES.get(name, ...) is None for name in names) and rng.random() < SET


def _set(rng: random.Random, message: Message, field: Any) -> None:
    maker = VALUES.get(f"{field.containing_type.name}.{field.name}") or VALUES.get(field.name)
    value: Any = getattr(message, field.name)
    # [] is the default of repeated fields in every version of protobuf.
    if field.default_value == []:
        if field.message_type is not None:
            for _ in range(rng.choice([1, 1, 2, 5])):
                value.add().CopyFrom(lawful(rng, field.message_type))
        else:
            value.extend(maker(rng) if maker else [scalar(rng, field)])
    elif isinstance(value, Message):
        value.SetInParent()
        value.CopyFrom(lawful(rng, field.message_type))
    elif maker:
        setattr(message, field.name, maker(rng))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        setattr(message, field.name, rng.random() < 0.5)
    else:
        setattr(message, field.name, scalar(rng, field))


def encoded(rng: random.Random, descriptor: Any, *, forbidden: frozenset[str] = frozenset()) -> bytes:
    """A message as bytes: lawful in about half of all cases, with one or two wild fields in a third, and wild bytes in
    a sixth. Fields of the names in `forbidden` are never set.
    """
    message, kept_clear = lawful(rng, descriptor), forbidden & set(descriptor.fields_by_name)
    fate = rng.random()
    for _ in range(0 if fate < 0.5 else rng.choice([1, 1, 2])):
        mutate(rng, message)
    for name in kept_clear:
        message.ClearField(name)
    data = message.SerializeToString()
    if fate < 0.83:
        return data
    made = hostile(rng, data, descriptor, MOST_BYTES if rng.random() < 0.005 else USUAL_BYTES)
    if kept_clear:
        try:
            found = type(message).FromString(made)
        except DecodeError:
            return made
        if any(getattr(found, name) for name in kept_clear):
            return data
    return made
