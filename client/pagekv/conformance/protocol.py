"""Layer one: epochs, streams and the order of results, rules P1 to P13."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.conformance.kit import Kit, Rule, expect, refused, with_unknown
from pagekv.conformance.link import Refusal
from pagekv.conformance.played import PlayedEpoch
from pagekv.conformance.scene import HUGE
from pagekv.conformance.target import MANAGER, REVISION
from pagekv.conformance.verdict import BrokenRule, NotTested, during, require
from pagekv.steps.v1 import executor_service_pb2 as pb

Code = grpc.StatusCode
OTHER = f"{MANAGER}-other"
# Steps sent at once, unless twice as many as the executor takes in are more; and more than those are never sent.
MIN_SENT, MAX_SENT = 40, 400
IDENTITY = ("model_id", "model_fingerprint", "kv_dtype", "vocab_size", "max_model_len", "bytes_per_block", "layout")
# A feature that no revision has had so far.
NO_FEATURE = 9999
MAX_REVISION = 65535
BAD_DESCRIBE = (
    *(("block_size", size) for size in (0, 3, 512)),
    *(("token_budget", budget) for budget in (0, 65537)),
    *(("contract_revision", revision) for revision in (MAX_REVISION + 1, HUGE)),
)
BAD_ATTACH: tuple[tuple[str, object], ...] = (
    *(("manager_id", name) for name in ("", "x" * 129)),
    *(("block_size", size) for size in (0, 3, 512)),
    ("num_device_blocks", 0),
    ("layout", "no such layout"),
)
# Bytes of a sequence in a step besides its tokens, at most.
SEQUENCE_BYTES = 256
# Of a pool with more blocks one too many cannot be asked for.
MAX_BLOCKS = 2**31 - 1
# Bounds of DescribeResponse.
NUMBERS = {
    **dict.fromkeys(("num_layers", "num_kv_heads", "head_size"), (1, 2**16)),
    "vocab_size": (1, 2**31 - 1),
    "max_model_len": (2, 2**31 - 1),
    "bytes_per_block": (1, 2**48),
    **dict.fromkeys(("device_kv_bytes", "host_kv_bytes"), (0, 2**62)),
    "max_sequences": (1, 2**31 - 1),
    "contract_revision": (REVISION, MAX_REVISION),
    "max_steps_in_flight": (2, 2**31 - 1),
    "max_logprobs": (0, 128),
    "tensor_parallel_size": (0, 1024),
}
TEXTS = {
    "model_id": r".{0,4096}",
    "model_fingerprint": r"[0-9a-fA-F]{1,128}",
    "kv_dtype": r"[a-z0-9._-]{1,64}",
    "layout": r".{1,128}",
    "backend": r".{1,64}",
    "sampler": r"[a-z0-9.-]{1,64}",
}
MAX_ENTRIES = {"versions": 64, "features": 64, "eos_token_ids": 960}


def describe_changes_nothing(kit: Kit) -> None:
    prompt = kit.answers.prompts[0]
    with kit.epoch() as epoch:
        seq = epoch.sequence(prompt)
        epoch.step([seq])
        for budget in (64, 256):
            _describes_the_same(kit, token_budget=budget)
            epoch.decode(2)
        kit.answers.compare(seq, "a sequence during Describe")


def an_attach_ends_the_epoch_before(kit: Kit) -> None:
    seen: set[int] = set()
    for _ in range(3):
        with kit.epoch() as epoch:
            require(epoch.epoch not in seen | {0}, f"epoch {epoch.epoch} was given before, or is 0")
            seen.add(epoch.epoch)
            epoch.step([epoch.sequence(kit.answers.prompts[1])])
            new = kit.target.attach()
            require(new not in seen | {0}, f"epoch {new} was given before, or is 0")
            seen.add(new)
            with during("the stream of the epoch before"):
                expect(refused(epoch.call), Code.ABORTED)
    kit.goes_on()


def a_held_executor_is_taken_over_only_when_told(kit: Kit) -> None:
    number = kit.target.attach()
    stray = kit.target.run()
    _stale_step_is_refused(kit, number + 1)
    with during("Attach of another manager, beside a stream that names no epoch"):
        kit.target.attach(OTHER)
    stray.close()
    number = kit.target.attach()
    idle = kit.target.run(number)
    _stale_step_is_refused(kit, number + 1)
    with during("before the first step of a stream that names its epoch"):
        refusal = _refuses_attach(kit, Code.FAILED_PRECONDITION, manager_id=OTHER)
    for secret in (MANAGER, str(number)):
        require(secret not in refusal.words, f"another manager is told {secret}, with which it could pass for this one")
    idle.close()
    with kit.epoch() as epoch:
        seq = epoch.sequence(kit.answers.prompts[0])
        epoch.step([seq])
        with during("Attach of another manager"):
            _refuses_attach(kit, Code.FAILED_PRECONDITION, manager_id=OTHER)
        epoch.decode(3)
        kit.answers.compare(seq, "the first manager's sequence")
        with during("Attach of another manager with take_over"):
            kit.target.attach(OTHER, take_over=True)
            expect(refused(epoch.call), Code.ABORTED)


def an_epoch_has_one_stream(kit: Kit) -> None:
    with kit.epoch() as epoch:
        seq = epoch.sequence(kit.answers.prompts[0])
        epoch.step([seq])
        second = kit.target.run()
        second.send(pb.StepRequest(epoch=epoch.epoch, step=2))
        expect(second.refusal(), Code.FAILED_PRECONDITION)
        epoch.decode(3)
        kit.answers.compare(seq, "the first stream's sequence")


def every_step_has_one_result(kit: Kit) -> None:
    with kit.epoch() as epoch:
        epoch.step()
        first, second = (epoch.sequence(prompt) for prompt in kit.answers.prompts[:2])
        epoch.step([first], counts={first: 3})
        epoch.step([second], counts={first: 0})
        for _ in range(5):
            epoch.send(others=0)
        for _ in range(5):
            epoch.receive()
        epoch.step(finish=[first, second])
        epoch.step()


def stale_steps_touch_nothing(kit: Kit) -> None:
    prompt = kit.answers.prompts[0]
    old = kit.target.attach()
    with kit.epoch() as epoch:
        seq = epoch.sequence(prompt)
        epoch.step([seq])
        for number in (old, epoch.epoch + 1):
            stray = kit.target.run()
            stray.send(pb.StepRequest(epoch=number, step=2, finished_seqs=[seq.seq_id]))
            with during(f"a stream of epoch {number} beside the present one {epoch.epoch}"):
                expect(stray.refusal(), Code.ABORTED)
        epoch.decode(3)
        kit.answers.compare(seq, "a sequence of the present epoch")
        epoch.call.send(pb.StepRequest(epoch=old, step=epoch.step_number + 1))
        with during("a step of an old epoch in the stream of the present one"):
            expect(epoch.call.refusal(), Code.ABORTED)


def a_refusal_ends_the_epoch(kit: Kit) -> None:
    with kit.epoch() as epoch:
        seq = epoch.sequence(kit.answers.prompts[1])
        epoch.send([seq])
        for _ in range(2):
            epoch.send()
        bad = pb.StepRequest(epoch=epoch.epoch, step=epoch.step_number + 1, finished_seqs=[seq.seq_id + 7])
        epoch.call.send(bad)
        epoch.call.send(pb.StepRequest(epoch=epoch.epoch, step=epoch.step_number + 2))
        for _ in range(3):
            epoch.receive()
        kit.answers.compare(seq, "a sequence of the steps before")
        expect(epoch.call.refusal(), Code.INVALID_ARGUMENT)
        _is_over(kit, epoch)
    kit.goes_on()


def half_closing_drains(kit: Kit) -> None:
    with kit.epoch() as epoch:
        seq = epoch.sequence(kit.answers.prompts[1])
        epoch.send([seq])
        for _ in range(3):
            epoch.send()
        epoch.call.half_close()
        for _ in range(4):
            epoch.receive()
        kit.answers.compare(seq, "a sequence")
        end = epoch.call.outcome()
        require(end is None, f"the stream ended with {end}, not OK")
        _is_over(kit, epoch)


def many_steps_wait(kit: Kit) -> None:
    most = kit.description.max_steps_in_flight
    require(most >= 2, f"max_steps_in_flight is {most}, below 2")
    with kit.epoch() as epoch:
        seq = epoch.sequence(kit.answers.prompts[1])
        epoch.send([seq])
        num_sent = min(MAX_SENT, max(MIN_SENT, 2 * most))
        for _ in range(num_sent - 3):
            epoch.send(others=0)
        for _ in range(2):
            epoch.send()
        for _ in range(num_sent):
            epoch.receive()
        kit.answers.compare(seq, f"a sequence of {num_sent} steps sent at once")


def attach_refuses_by_name(kit: Kit) -> None:
    link, asking, attaching = kit.target.link, kit.target.describe_request, kit.target.attach_request
    with kit.epoch() as epoch:
        seq = epoch.sequence(kit.answers.prompts[0])
        epoch.step([seq])
        for name, number in BAD_DESCRIBE:
            with during(f"Describe with {name} {number}"):
                _refuses(partial(link.describe, asking(**{name: number})), Code.INVALID_ARGUMENT, name)
        for revision in (0, REVISION + 1, MAX_REVISION):
            with during(f"Describe with contract_revision {revision}"):
                _describes_the_same(kit, contract_revision=revision)
        with during("Describe with a field that is not known"):
            _refuses(partial(link.describe, with_unknown(asking())), Code.INVALID_ARGUMENT)
        with during("Attach with a field that is not known"):
            _refuses(partial(link.attach, with_unknown(attaching(take_over=True))), Code.INVALID_ARGUMENT)
        for name, value in BAD_ATTACH:
            _refuses_attach(kit, Code.INVALID_ARGUMENT, name, **{name: value})
        _refuses_attach(kit, Code.INVALID_ARGUMENT, "num_host_blocks", num_host_blocks=1, features=())
        _refuses_attach(kit, Code.FAILED_PRECONDITION, features=[*kit.target.features, NO_FEATURE])
        _refuses_attach(kit, Code.FAILED_PRECONDITION, features=[0])
        for number in sorted(set(pb.ExecutorFeature.values()) - {0} - set(kit.description.features)):
            _refuses_attach(kit, Code.FAILED_PRECONDITION, features=[number])
        for revision in (0, kit.description.contract_revision + 1):
            _refuses_attach(kit, Code.FAILED_PRECONDITION, contract_revision=revision)
        pools = {"num_device_blocks": kit.target.pool_blocks}
        if pb.EXECUTOR_FEATURE_HOST_POOL in kit.target.features:
            pools["num_host_blocks"] = kit.description.host_kv_bytes // kit.description.bytes_per_block
        for name, most in pools.items():
            if most < MAX_BLOCKS:
                with during(f"of {most} blocks that Describe's bytes make"):
                    _refuses_attach(kit, Code.RESOURCE_EXHAUSTED, **{name: most + 1})
        epoch.decode(3)
        kit.answers.compare(seq, "a sequence of the epoch before")


def describe_keeps_its_bounds(kit: Kit) -> None:
    told = kit.description
    for name, (least, most) in NUMBERS.items():
        number = getattr(told, name)
        require(least <= number <= most, f"{name} is {number}, not from {least} to {most}")
    for name, pattern in TEXTS.items():
        text = getattr(told, name)
        require(re.fullmatch(pattern, text), f"{name} is {text[:64]!r}, which is none of {pattern}")
    for name, most in MAX_ENTRIES.items():
        count = len(getattr(told, name))
        require(count <= most, f"{name} has {count} entries, {most} are allowed")
    features = list(told.features)
    require(len(set(features)) == len(features) and 0 not in features, f"features are {features}")
    ends = [token for token in told.eos_token_ids if token >= told.vocab_size]
    require(not ends, f"eos_token_ids {ends} are not below vocab_size {told.vocab_size}")
    has_pool = pb.EXECUTOR_FEATURE_HOST_POOL in features
    require(has_pool == bool(told.host_kv_bytes), f"host_kv_bytes is {told.host_kv_bytes}, HOST_POOL is {has_pool}")


def long_steps_are_taken(kit: Kit) -> None:
    """Long sequences enter and sit out, so nothing is computed."""
    token, most = kit.description.vocab_size - 1, kit.description.max_sequences
    num_bytes = -(-max(1, token.bit_length()) // 7)
    # Other fields of the step and of its sequences have less than the bytes left out here.
    longest = MAX_RECEIVE_BYTES - 2**16
    length = min(kit.description.max_model_len, longest // num_bytes)
    count = max(1, longest // (length * num_bytes + SEQUENCE_BYTES))
    if count > most:
        raise NotTested(f"{most} sequences of {length} tokens are too few for a long step")
    with kit.epoch() as epoch:
        seqs = [epoch.sequence([token] * length) for _ in range(count)]
        with during(f"a step of {longest >> 10} KiB"):
            epoch.step(seqs, counts=dict.fromkeys(seqs, 0))
        epoch.step(finish=seqs)


def _describes_the_same(kit: Kit, **fields: int) -> None:
    """Raises BrokenRule where Describe, asked otherwise, tells of another model or pool; Refusal."""
    answer = kit.target.link.describe(kit.target.describe_request(**fields))
    for name in IDENTITY:
        old, new = getattr(kit.description, name), getattr(answer, name)
        require(old == new, f"{name} was {old!r} and is {new!r}")


def _is_over(kit: Kit, epoch: PlayedEpoch) -> None:
    """Raises BrokenRule where the epoch takes another step."""
    with during("a step of the epoch that is over"):
        _stale_step_is_refused(kit, epoch.epoch, epoch.step_number + 1)


def _stale_step_is_refused(kit: Kit, epoch: int, step: int = 1) -> None:
    """Sends a step of an epoch that is not the present one. Calls that were made before are there with the answer."""
    call = kit.target.run()
    call.send(pb.StepRequest(epoch=epoch, step=step))
    expect(call.refusal(), Code.ABORTED)


def _refuses_attach(kit: Kit, code: grpc.StatusCode, *fields: str, **attaching: Any) -> Refusal:
    attaching.setdefault("take_over", "manager_id" not in attaching)
    with during(f"Attach with {', '.join(f'{name} {value!r}'[:80] for name, value in attaching.items())}"):
        return _refuses(lambda: kit.target.attach(**attaching), code, *fields)


def _refuses(call: Callable[[], object], code: grpc.StatusCode, *fields: str) -> Refusal:
    try:
        call()
    except Refusal as refusal:
        expect(refusal, code, (), fields)
        return refusal
    raise BrokenRule(f"was accepted, not {code.name}")


RULES: tuple[Rule, ...] = (
    Rule("P1", "Describe during an epoch changes nothing", describe_changes_nothing),
    Rule("P2", "Attach ends the epoch before it; no epoch number comes twice", an_attach_ends_the_epoch_before),
    Rule("P3", "another manager takes over only when told to", a_held_executor_is_taken_over_only_when_told),
    Rule("P4", "an epoch has one stream at a time", an_epoch_has_one_stream),
    Rule("P5", "every step has one result, in order", every_step_has_one_result),
    Rule("P6", "steps of other epochs are ABORTED and touch nothing", stale_steps_touch_nothing),
    Rule("P7", "a refusal follows earlier results and ends the epoch", a_refusal_ends_the_epoch),
    Rule("P8", "half-closing drains the stream and ends the epoch", half_closing_drains),
    Rule("P9", "steps sent ahead wait, and none is refused", many_steps_wait),
    Rule("P11", "Describe and Attach refuse by name, and end nothing", attach_refuses_by_name),
    Rule("P12", "Describe keeps the bounds of its fields", describe_keeps_its_bounds),
    Rule("P13", "long steps are taken", long_steps_are_taken),
)
