"""Layer two: a step that breaks a rule is refused by its field, and nothing is touched, rules R1 to R37."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.conformance.kit import Kit, Rule, expect, with_unknown
from pagekv.conformance.played import COPY, SWAP_IN, SWAP_OUT, PlayedEpoch, copying
from pagekv.conformance.sampling_refusals import BAD_SAMPLING, UNREQUIRED, UNSET
from pagekv.conformance.scene import FREE_BLOCK, HUGE, NEW_BLOCK, BadStep, LiveScene, new_sequence
from pagekv.conformance.target import TOKEN_BUDGET
from pagekv.conformance.verdict import NotTested
from pagekv.steps.v1 import executor_service_pb2 as pb

HOST_POOL = pb.EXECUTOR_FEATURE_HOST_POOL
MAX_STEP_TOKENS = 65536
# The longest sequence that is computed to see where the model ends (R31), and the most sequences of one step (R20).
MAX_COMPUTED, MAX_ENTERING = 16384, 20000
# The most tokens, of a byte each, that are sent to be refused (R11, R33): an executor need not take larger steps (P13).
MAX_TOKENS = MAX_RECEIVE_BYTES - 2**16
# No operation has this kind.
UNKNOWN_KIND: Any = 99


def op(kind: pb.MemoryOpKind.ValueType, sources: Sequence[int], destinations: Sequence[int]) -> dict[str, Any]:
    """A step whose second memory operation is this one."""
    return {"memory_ops": [copying(COPY, [0], [20]), copying(kind, sources, destinations)]}


def append(seqs: Sequence[int], blocks: Sequence[int]) -> dict[str, Any]:
    return {"append_seqs": seqs, "append_blocks": blocks}


def schedule(seqs: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
    return {"scheduled_seqs": seqs, "scheduled_tokens": tokens}


def longer_than_the_model(scene: LiveScene) -> dict[str, Any]:
    if scene.max_len > MAX_TOKENS:
        raise NotTested(f"max_model_len {scene.max_len} does not fit into a step of {MAX_RECEIVE_BYTES} bytes")
    return scene.entering(token_ids=[0] * (scene.max_len + 1))


def too_many_sequences(scene: LiveScene) -> dict[str, Any]:
    """One more than may be live, two of which are."""
    count = scene.kit.description.max_sequences - 1
    if count > MAX_ENTERING:
        raise NotTested(f"max_sequences {count + 1} are too many to start")
    ids = range(9, 9 + count)
    return {"new_seqs": [new_sequence(seq_id=seq_id, block_ids=[]) for seq_id in ids], **schedule(ids, [0] * count)}


def _long_sequences(scene: LiveScene) -> int:
    """So many of the longest sequences have more tokens than a step may compute."""
    return MAX_STEP_TOKENS // scene.max_len + 1


def too_many_tokens(scene: LiveScene) -> dict[str, Any]:
    count, most = _long_sequences(scene), scene.max_blocks
    if count + 2 > scene.kit.description.max_sequences:
        raise NotTested(f"max_sequences of the greatest length have fewer than {MAX_STEP_TOKENS} tokens")
    if count * scene.max_len > MAX_TOKENS:
        raise NotTested(f"max_model_len {scene.max_len} does not fit into a step of {MAX_RECEIVE_BYTES} bytes")
    new = [
        new_sequence(
            seq_id=9 + index,
            token_ids=[0] * scene.max_len,
            num_prompt_tokens=1,
            block_ids=range(FREE_BLOCK + index * most, FREE_BLOCK + (index + 1) * most),
        )
        for index in range(count)
    ]
    return {"new_seqs": new, **schedule(range(9, 9 + count), [scene.max_len] * count)}


def one_too_many_computed(scene: LiveScene) -> dict[str, Any]:
    """Of the block that sequence 1, which leaves, would have written next."""
    computed = len(scene.prompts[0]) % scene.size + 1
    return {
        "finished_seqs": [1],
        **scene.entering(
            token_ids=[0] * (computed + 1),
            num_prompt_tokens=1,
            block_ids=[scene.written, FREE_BLOCK],
            computed_tokens=computed,
        ),
    }


# By number and words of the rule.
BAD_STEPS: dict[str, tuple[BadStep, ...]] = {
    "R1 steps are counted from 1": (
        BadStep("a step again", {"step": 1}, ["step"]),
        BadStep("a step left out", {"step": 3}, ["step"]),
        BadStep("an epoch that begins with step 2", {}, ["step"], first=True),
    ),
    "R2 finished_seqs are live": (
        BadStep("a sequence that is not there", {"finished_seqs": [1, 7]}, ["finished_seqs[1]"]),
    ),
    "R3 finished_seqs stand once": (BadStep("a sequence twice", {"finished_seqs": [1, 2, 1]}, ["finished_seqs[2]"]),),
    "R4 memory_ops.kind is known": (
        BadStep("no kind", op(pb.MEMORY_OP_KIND_UNSPECIFIED, [0], [21]), ["memory_ops[1].kind"]),
        BadStep("kind 99", op(UNKNOWN_KIND, [0], [21]), ["memory_ops[1].kind"]),
    ),
    "R5 swaps need a host pool": (
        BadStep("SWAP_OUT", op(SWAP_OUT, [], []), ["memory_ops[1].kind"]),
        BadStep("SWAP_IN", op(SWAP_IN, [], []), ["memory_ops[1].kind"]),
    ),
    "R6 memory_ops have pairs": (
        BadStep("one too few", op(COPY, [0, 1], [21]), ["memory_ops[1].destinations"]),
        BadStep("one too many", op(COPY, [0], [21, 22]), ["memory_ops[1].destinations"]),
    ),
    "R7 memory_ops name blocks of their pool": (
        BadStep("COPY from", lambda s: op(COPY, [0, s.num_blocks], [21, 22]), ["memory_ops[1].sources[1]"]),
        BadStep("COPY to", lambda s: op(COPY, [0], [s.num_blocks]), ["memory_ops[1].destinations[0]"]),
        BadStep("COPY far", op(COPY, [0], [HUGE]), ["memory_ops[1].destinations[0]"]),
        BadStep("SWAP_OUT to", op(SWAP_OUT, [0], [8]), ["memory_ops[1].destinations[0]"], needs=HOST_POOL),
        BadStep("SWAP_IN from", op(SWAP_IN, [8], [30]), ["memory_ops[1].sources[0]"], needs=HOST_POOL),
    ),
    "R8 memory_ops write no block twice": (
        BadStep("a destination twice", op(COPY, [0, 1], [21, 21]), ["memory_ops[1].destinations[1]"]),
    ),
    "R9 COPY has no chains": (
        BadStep("a chain", op(COPY, [0, 1], [1, 22]), ["memory_ops[1].destinations[0]"]),
        BadStep("a block onto itself", op(COPY, [1], [1]), ["memory_ops[1].destinations[0]"]),
    ),
    "R10 new_seqs.seq_id is free": (
        BadStep("the number of a live sequence", lambda s: s.entering(seq_id=1), ["new_seqs[0].seq_id"]),
        BadStep(
            "a number twice",
            {"new_seqs": [new_sequence(), new_sequence(block_ids=[FREE_BLOCK])]},
            ["new_seqs[1].seq_id"],
        ),
    ),
    "R11 new_seqs.token_ids are 1 to max_model_len": (
        BadStep(
            "no tokens",
            lambda s: s.idle(token_ids=[], num_prompt_tokens=0),
            ["new_seqs[0].token_ids", "new_seqs[0].num_prompt_tokens", "new_seqs[0].computed_tokens"],
            rules=("R11", "R13", "R17"),
        ),
        BadStep("too many", longer_than_the_model, ["new_seqs[0].token_ids"]),
    ),
    "R12 new_seqs.token_ids are of the vocabulary": (
        BadStep("the first id too high", lambda s: s.entering(token_ids=[0, s.vocab, 0]), ["new_seqs[0].token_ids[1]"]),
        BadStep("the highest number", lambda s: s.entering(token_ids=[0, 0, HUGE]), ["new_seqs[0].token_ids[2]"]),
    ),
    "R13 new_seqs.num_prompt_tokens is within token_ids": (
        BadStep("none", lambda s: s.entering(num_prompt_tokens=0), ["new_seqs[0].num_prompt_tokens"]),
        BadStep("one too many", lambda s: s.entering(num_prompt_tokens=4), ["new_seqs[0].num_prompt_tokens"]),
    ),
    "R14 new_seqs.block_ids are not too many": (
        BadStep(
            "one block too many",
            lambda s: s.entering(block_ids=range(FREE_BLOCK, FREE_BLOCK + s.max_blocks + 1)),
            ["new_seqs[0].block_ids"],
            num_blocks=lambda s: FREE_BLOCK + s.max_blocks + 1,
        ),
    ),
    "R15 new_seqs.block_ids are of the pool": (
        BadStep(
            "the first id too high", lambda s: s.entering(block_ids=[9, s.num_blocks]), ["new_seqs[0].block_ids[1]"]
        ),
        BadStep("the highest number", lambda s: s.entering(block_ids=[HUGE]), ["new_seqs[0].block_ids[0]"]),
    ),
    "R16 new_seqs.block_ids stand once": (
        BadStep("a block twice", lambda s: s.entering(block_ids=[9, 10, 9]), ["new_seqs[0].block_ids[2]"]),
    ),
    "R17 new_seqs.computed_tokens is within tokens and blocks": (
        BadStep(
            "all tokens", lambda s: s.idle(computed_tokens=3, block_ids=[0, 1, 2]), ["new_seqs[0].computed_tokens"]
        ),
        BadStep("no blocks", lambda s: s.idle(computed_tokens=1, block_ids=[]), ["new_seqs[0].computed_tokens"]),
    ),
    "R18 new_seqs.sampling is set, with numbers within bounds": (UNSET, *BAD_SAMPLING["R18"]),
    "R19 new_seqs.sampling has lists within bounds": BAD_SAMPLING["R19"],
    "R20 live sequences are at most max_sequences": (
        BadStep("one sequence too many", too_many_sequences, ["new_seqs"]),
    ),
    "R21 append columns have pairs": (
        BadStep("one too few", append([1, 1], [FREE_BLOCK]), ["append_blocks"]),
        BadStep("one too many", append([1], [FREE_BLOCK, FREE_BLOCK + 1]), ["append_blocks"]),
    ),
    "R22 append_blocks are of the pool": (
        BadStep("the first id too high", lambda s: append([2], [s.num_blocks]), ["append_blocks[0]"]),
        BadStep("the highest number", append([2], [HUGE]), ["append_blocks[0]"]),
    ),
    "R23 append_seqs are live": (
        BadStep("a sequence that is not there", append([7], [FREE_BLOCK]), ["append_seqs[0]"]),
        BadStep("one that leaves", {"finished_seqs": [1], **append([1], [FREE_BLOCK])}, ["append_seqs[0]"]),
    ),
    "R24 append_blocks are not in the table": (
        BadStep("a block that it has", append([2], [5]), ["append_blocks[0]"]),
        BadStep("a block twice", append([2, 2], [FREE_BLOCK, FREE_BLOCK]), ["append_blocks[1]"]),
        BadStep("a block that it enters with", lambda s: {**s.entering(), **append([9], [9])}, ["append_blocks[0]"]),
    ),
    "R25 tables grow to the model's length": (
        BadStep(
            "one block too many",
            lambda s: append([1] * (s.max_blocks - 4), range(FREE_BLOCK, FREE_BLOCK + s.max_blocks - 4)),
            ["append_blocks"],
            num_blocks=lambda s: FREE_BLOCK + s.max_blocks,
        ),
    ),
    "R26 scheduled columns have pairs": (
        BadStep("one too few", schedule([1, 2], [1]), ["scheduled_tokens"]),
        BadStep("one too many", schedule([1], [1, 1]), ["scheduled_tokens"]),
    ),
    "R27 scheduled_seqs are live": (
        BadStep("a sequence that is not there", schedule([7], [1]), ["scheduled_seqs[0]"]),
        BadStep("one that leaves", {"finished_seqs": [2], **schedule([2], [1])}, ["scheduled_seqs[0]"]),
    ),
    "R28 scheduled_seqs stand once": (BadStep("a sequence twice", schedule([2, 2], [1, 1]), ["scheduled_seqs[1]"]),),
    "R29 scheduled_tokens are left to compute": (
        BadStep("one more than is left", schedule([1], [2]), ["scheduled_tokens[0]"]),
        BadStep("the highest number", schedule([1], [HUGE]), ["scheduled_tokens[0]"]),
    ),
    "R30 computed positions have slots": (
        BadStep("a live sequence's table is full", lambda s: schedule([2], [len(s.prompts[1]) - 1]), ["append_blocks"]),
        BadStep("no blocks at all", lambda s: s.entering(block_ids=[]), ["new_seqs[0].block_ids"]),
        BadStep(
            "one position too many",
            lambda s: {**s.entering(token_ids=[0] * (s.size + 1), num_prompt_tokens=1), **schedule([9], [s.size + 1])},
            ["new_seqs[0].block_ids"],
        ),
    ),
    # A bad step of it comes late in an epoch of its own: `beyond_the_model`.
    "R31 computed positions are below max_model_len": (),
    "R32 a block has one writer in a step": (
        BadStep(
            "an entering sequence and a live one",
            lambda s: s.entering(block_ids=[s.written]),
            ["new_seqs[0].block_ids", "append_blocks"],
        ),
        BadStep(
            "two entering sequences",
            {"new_seqs": [new_sequence(), new_sequence(seq_id=10)]},
            ["new_seqs[1].block_ids", "new_seqs[0].block_ids"],
        ),
    ),
    "R33 a step computes at most 65536 tokens": (
        BadStep(
            "one token too many",
            too_many_tokens,
            ["scheduled_tokens"],
            num_blocks=lambda s: FREE_BLOCK + _long_sequences(s) * s.max_blocks,
        ),
    ),
    "R34 fields of features that were not required are refused": UNREQUIRED,
    "R35 unknown fields are refused": (
        BadStep("in the sequence", {"new_seqs": [with_unknown(new_sequence())]}, []),
        BadStep("in the sampling", {"new_seqs": [new_sequence(sampling=with_unknown(new_sequence().sampling))]}, []),
        BadStep("in a memory operation", {"memory_ops": [with_unknown(copying(COPY, [0], [20]))]}, []),
    ),
    "R36 memory_ops read blocks that were written": (
        BadStep("COPY", op(COPY, [0, FREE_BLOCK], [21, 22]), ["memory_ops[1].sources[1]"]),
        BadStep("SWAP_OUT", op(SWAP_OUT, [0, FREE_BLOCK], [0, 1]), ["memory_ops[1].sources[1]"], needs=HOST_POOL),
        BadStep("SWAP_IN", op(SWAP_IN, [0], [21]), ["memory_ops[1].sources[0]"], needs=HOST_POOL),
        BadStep(
            "what was copied to it comes later",
            {"memory_ops": [copying(COPY, [20], [21]), copying(COPY, [0], [20])]},
            ["memory_ops[0].sources[0]"],
        ),
    ),
    "R37 computed_tokens were written": (
        BadStep(
            "in no block",
            lambda s: s.entering(computed_tokens=1, block_ids=[NEW_BLOCK, FREE_BLOCK]),
            ["new_seqs[0].computed_tokens"],
        ),
        BadStep("by one that sits out", lambda s: s.idle(computed_tokens=1), ["new_seqs[0].computed_tokens"]),
        BadStep("one more than another sequence wrote", one_too_many_computed, ["new_seqs[0].computed_tokens"]),
    ),
}


def beyond_the_model(kit: Kit, rule: str) -> None:
    """A sequence of the greatest length samples, and would compute that token."""
    length, blocks = int(kit.description.max_model_len), kit.target.max_blocks
    if length > MAX_COMPUTED:
        raise NotTested(f"max_model_len {length} takes too long to compute")
    if blocks > kit.target.pool_blocks:
        raise NotTested(f"needs {blocks} blocks, the pool has {kit.target.pool_blocks}")
    with PlayedEpoch(kit.target, num_blocks=blocks) as epoch:
        seq = epoch.sequence([0] * length)
        epoch.step([seq], counts={seq: min(TOKEN_BUDGET, length)})
        while seq.computed < length:
            epoch.step(counts={seq: min(TOKEN_BUDGET, length - seq.computed)})
        epoch.call.send(pb.StepRequest(epoch=epoch.epoch, step=epoch.step_number + 1))
        # Its table is full too, where blocks end with the model.
        full = length % kit.target.block_size == 0
        rules, fields = [rule, *["R30"] * full], ["scheduled_seqs", "scheduled_tokens", *["append_blocks"] * full]
        expect(epoch.call.refusal(), grpc.StatusCode.INVALID_ARGUMENT, rules, fields)


def an_unknown_field_of_the_step(kit: Kit, rule: str) -> None:
    """StepRequest itself, whose fields a message made anew would lose."""
    with kit.epoch() as epoch:
        epoch.call.send(with_unknown(pb.StepRequest(epoch=epoch.epoch, step=1)))
        expect(epoch.call.refusal(), grpc.StatusCode.INVALID_ARGUMENT, [rule])


SPECIAL: dict[str, Callable[[Kit, str], None]] = {"R31": beyond_the_model, "R35": an_unknown_field_of_the_step}


def _rule(title: str, steps: Sequence[BadStep]) -> Rule:
    number, _, words = title.partition(" ")

    def check(kit: Kit) -> None:
        untried: list[NotTested] = []
        for bad in steps:
            try:
                bad.check(kit, number)
            except NotTested as error:
                untried.append(error)
        if number in SPECIAL:
            SPECIAL[number](kit, number)
        elif len(untried) == len(steps):
            raise untried[-1]
        kit.goes_on()

    return Rule(number, words, check)


RULES: tuple[Rule, ...] = tuple(_rule(title, steps) for title, steps in BAD_STEPS.items())
