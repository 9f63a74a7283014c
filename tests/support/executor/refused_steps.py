"""Steps that break one rule each, by the rule's number in executor_service.proto."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.executor.executor_steps import VOCAB, memory_op, new_sequence

from pagekv.executor.backend.interface import BackendFeature, CopyDirection, Sampling
from pagekv.executor.session.step import NO_SAMPLING


def entering(**fields: Any) -> dict[str, Any]:
    """A step with one new sequence of 3 tokens in block 9."""
    return {"new_seqs": [replace(new_sequence(9, [1, 2, 3], [9]), **fields)]}


def sampling(**fields: Any) -> dict[str, Any]:
    return entering(sampling=Sampling(**fields))


def copying(kind: CopyDirection | None, sources: list[int], destinations: list[int]) -> dict[str, Any]:
    return {"memory_ops": [memory_op(CopyDirection.COPY, [0], [20]), memory_op(kind, sources, destinations)]}


COPY, OUT, IN = CopyDirection.COPY, CopyDirection.SWAP_OUT, CopyDirection.SWAP_IN

IDLE = {"scheduled_seqs": [9], "scheduled_tokens": [0]}

# Of sequences 1 (tokens 0-8 computed, blocks 0-2) and 2 (4 of 10 tokens computed, blocks 3-5), max_model_len 64:
# (id, the rule, columns of the step, the field refused, a part of the description)
REFUSALS: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("step-repeated", "R1", {"step": 2}, "step", "must be 3"),
    ("step-skipped", "R1", {"step": 4}, "step", "must be 3"),
    ("finished-unknown", "R2", {"finished_seqs": [1, 7]}, "finished_seqs[1]", "must be a live sequence, got 7"),
    ("finished-twice", "R3", {"finished_seqs": [1, 1]}, "finished_seqs[1]", "names sequence 1 twice"),
    ("op-kind", "R4", copying(None, [0], [21]), "memory_ops[1].kind", "must be COPY, SWAP_OUT or SWAP_IN"),
    ("op-lengths", "R6", copying(COPY, [0, 1], [21]), "memory_ops[1].destinations", "must have 2 entries"),
    ("copy-source", "R7", copying(COPY, [0, 32], [21, 22]), "memory_ops[1].sources[1]", "below 32, got 32"),
    (
        "copy-destination",
        "R7",
        copying(COPY, [0], [2**32 - 1]),
        "memory_ops[1].destinations[0]",
        "below 32, got 4294967295",
    ),
    ("out-destination", "R7", copying(OUT, [31], [8]), "memory_ops[1].destinations[0]", "below 8, got 8"),
    ("in-source", "R7", copying(IN, [8], [31]), "memory_ops[1].sources[0]", "below 8, got 8"),
    ("in-destination", "R7", copying(IN, [7], [32]), "memory_ops[1].destinations[0]", "below 32, got 32"),
    (
        "op-destination-twice",
        "R8",
        copying(COPY, [0, 1], [21, 21]),
        "memory_ops[1].destinations[1]",
        "names block 21 twice",
    ),
    ("op-chain", "R9", copying(COPY, [0, 21], [21, 22]), "memory_ops[1].destinations[0]", "must not be a source"),
    ("op-self", "R9", copying(COPY, [5], [5]), "memory_ops[1].destinations[0]", "must not be a source"),
    ("new-id-live", "R10", entering(seq_id=1), "new_seqs[0].seq_id", "must not be in use by a live sequence, got 1"),
    (
        "new-id-twice",
        "R10",
        {"new_seqs": [new_sequence(9, [1], [9]), new_sequence(9, [1], [10])]},
        "new_seqs[1].seq_id",
        "9",
    ),
    (
        "new-empty",
        "R11",
        entering(token_ids=[], num_prompt_tokens=0),
        "new_seqs[0].token_ids",
        "from 1 to 64 entries, has 0",
    ),
    ("new-long", "R11", entering(token_ids=[1] * 65), "new_seqs[0].token_ids", "from 1 to 64 entries, has 65"),
    ("new-token", "R12", entering(token_ids=[1, VOCAB, 3]), "new_seqs[0].token_ids[1]", "below 512, got 512"),
    ("new-no-prompt", "R13", entering(num_prompt_tokens=0), "new_seqs[0].num_prompt_tokens", "from 1 to"),
    ("new-prompt", "R13", entering(num_prompt_tokens=4), "new_seqs[0].num_prompt_tokens", "(3), got 4"),
    ("new-computed-all", "R17", entering(computed_tokens=3), "new_seqs[0].computed_tokens", "from 0 to 2"),
    (
        "new-computed-nowhere",
        "R17",
        entering(block_table=[], computed_tokens=1),
        "new_seqs[0].computed_tokens",
        "from 0 to 0",
    ),
    ("new-block", "R15", entering(block_table=[9, 32]), "new_seqs[0].block_ids[1]", "below 32, got 32"),
    ("new-block-twice", "R16", entering(block_table=[9, 10, 9]), "new_seqs[0].block_ids[2]", "names block 9 twice"),
    (
        "new-table-long",
        "R14",
        entering(block_table=list(range(17))),
        "new_seqs[0].block_ids",
        "at most 16 entries, has 17",
    ),
    ("new-no-blocks", "R30", entering(block_table=[]), "new_seqs[0].block_ids", "hold positions below 0"),
    (
        "new-too-few-blocks",
        "R30",
        {
            "new_seqs": [new_sequence(9, [1] * 9, [9, 10])],
            "scheduled_seqs": [9],
            "scheduled_tokens": [9],
        },
        "new_seqs[0].block_ids",
        "hold positions below 8",
    ),
    ("no-sampling", "R18", entering(sampling=NO_SAMPLING), "new_seqs[0].sampling", "must be set"),
    (
        "temperature-low",
        "R18",
        sampling(temperature=-0.1),
        "new_seqs[0].sampling.temperature",
        "from 0 to 100, got -0.1",
    ),
    (
        "bias-id",
        "R19",
        sampling(bias_token_ids=(VOCAB,), biases=(1.0,)),
        "new_seqs[0].sampling.bias_token_ids[0]",
        "below",
    ),
    ("append-columns", "R21", {"append_seqs": [1, 2], "append_blocks": [9]}, "append_blocks", "must have 2 entries"),
    (
        "append-unknown",
        "R23",
        {"append_seqs": [7], "append_blocks": [9]},
        "append_seqs[0]",
        "must be a live sequence, got 7",
    ),
    (
        "append-finished",
        "R23",
        {"finished_seqs": [1], "append_seqs": [1], "append_blocks": [9]},
        "append_seqs[0]",
        "must be a live sequence, got 1",
    ),
    ("append-block", "R22", {"append_seqs": [1], "append_blocks": [32]}, "append_blocks[0]", "below 32, got 32"),
    (
        "append-held",
        "R24",
        {"append_seqs": [1], "append_blocks": [2]},
        "append_blocks[0]",
        "in the table of sequence 1",
    ),
    (
        "append-twice",
        "R24",
        {"append_seqs": [1, 1], "append_blocks": [9, 9]},
        "append_blocks[1]",
        "in the table of sequence 1",
    ),
    (
        "append-held-by-new",
        "R24",
        {**entering(), "append_seqs": [9], "append_blocks": [9]},
        "append_blocks[0]",
        "in the table of sequence 9",
    ),
    (
        "append-too-long",
        "R25",
        {"append_seqs": [1] * 14, "append_blocks": list(range(10, 24))},
        "append_blocks[13]",
        "at most 16 blocks",
    ),
    (
        "scheduled-columns",
        "R26",
        {"scheduled_seqs": [1, 2], "scheduled_tokens": [1]},
        "scheduled_tokens",
        "must have 2 entries",
    ),
    (
        "scheduled-unknown",
        "R27",
        {"scheduled_seqs": [7], "scheduled_tokens": [1]},
        "scheduled_seqs[0]",
        "must be a live sequence, got 7",
    ),
    (
        "scheduled-finished",
        "R27",
        {"finished_seqs": [2], "scheduled_seqs": [2], "scheduled_tokens": [1]},
        "scheduled_seqs[0]",
        "must be a live sequence, got 2",
    ),
    (
        "scheduled-twice",
        "R28",
        {"scheduled_seqs": [2, 2], "scheduled_tokens": [1, 1]},
        "scheduled_seqs[1]",
        "names sequence 2 twice",
    ),
    (
        "scheduled-many",
        "R29",
        {"scheduled_seqs": [2], "scheduled_tokens": [7]},
        "scheduled_tokens[0]",
        "from 0 to 6",
    ),
    (
        "written-twice-new",
        "R32",
        {**entering(block_table=[2])},
        "new_seqs[0].block_ids",
        "block 2 would be written by sequences 1 and 9",
    ),
    (
        "written-twice-new-both",
        "R32",
        {"new_seqs": [new_sequence(8, [1], [9]), new_sequence(9, [1], [9])]},
        "new_seqs[1].block_ids",
        "block 9 would be written by sequences 8 and 9",
    ),
    *(
        (
            f"unwritten-{name}",
            "R36",
            {"memory_ops": ops},
            f"memory_ops[{len(ops) - 1}].sources[1]",
            f"got block {block}",
        )
        for name, block, ops in (
            ("copy", 9, [memory_op(COPY, [0, 9], [20, 21])]),
            # A block that a live sequence has, and has not come to.
            ("out", 4, [memory_op(OUT, [0, 4], [0, 1])]),
            ("in", 5, [memory_op(OUT, [0], [4]), memory_op(IN, [4, 5], [20, 21])]),
            ("copied-of-nothing", 21, [memory_op(COPY, [0], [20]), memory_op(COPY, [20, 21], [22, 23])]),
        )
    ),
    *(
        (
            f"computed-{name}",
            "R37",
            {**entering(token_ids=list(range(10)), block_table=table, computed_tokens=computed), **columns},
            "new_seqs[0].computed_tokens",
            part,
        )
        for name, table, computed, columns, part in (
            ("nowhere", [9, 10, 11], 5, {}, "4 slots of block 9, of which 0"),
            ("nowhere-idle", [9, 10, 11], 5, IDLE, "4 slots of block 9, of which 0"),
            # Its own writes do not count: block 2 has one token of another.
            ("in-part", [2, 9, 10], 2, {"finished_seqs": [1]}, "2 slots of block 2, of which 1"),
            (
                "copied-over",
                [0, 1, 9],
                8,
                {"memory_ops": [memory_op(COPY, [2], [0])]},
                "4 slots of block 0, of which 1",
            ),
            ("by-one-too-many", [3, 4, 9], 6, IDLE, "2 slots of block 4, of which 1"),
        )
    ),
]


def long_sequences() -> dict[str, Any]:
    """More tokens than a step may compute, though each sequence has blocks for its own."""
    new = [new_sequence(i, [1] * 1024, list(range(4 * i, 4 * i + 4))) for i in range(65)]
    return {"new_seqs": new, "scheduled_seqs": list(range(65)), "scheduled_tokens": [1024] * 65}


ONLY_LOGPROBS: dict[str, Any] = {"features": frozenset({BackendFeature.LOGPROBS})}
SAMPLING = "new_seqs[0].sampling"
# (id, the rule, a world, steps that go well, columns of the step, the field refused, a part of the description)
IN_OTHER_WORLDS: list[tuple[str, str, dict[str, Any], list[dict[str, Any]], dict[str, Any], str, str]] = [
    (
        "no-host-pool",
        "R5",
        {"num_host_blocks": 0},
        [],
        {"memory_ops": [memory_op(IN, [], [])]},
        "memory_ops[0].kind",
        "must be COPY",
    ),
    (
        "too-many-sequences",
        "R20",
        {"max_sequences": 2},
        [{"new_seqs": [new_sequence(1, [1], [0]), new_sequence(2, [2], [1])]}],
        {"new_seqs": [new_sequence(3, [3], [2])]},
        "new_seqs",
        "at most 2 live sequences, would leave 3",
    ),
    (
        "beyond-the-model",
        "R31",
        {"max_model_len": 6},
        [{"new_seqs": [new_sequence(1, [5] * 6, [0, 1])], "scheduled_seqs": [1], "scheduled_tokens": [6]}],
        {},
        "scheduled_seqs",
        "the model holds 6 tokens",
    ),
    (
        "too-many-tokens",
        "R33",
        {"block_size": 256, "num_device_blocks": 129 * 4, "max_model_len": 1024, "max_sequences": 256},
        [],
        long_sequences(),
        "scheduled_tokens",
        "65536",
    ),
    *(
        (f"unrequired-{name}", "R34", ONLY_LOGPROBS, [], sampling(**fields), f"{SAMPLING}.{name}", feature)
        for name, fields, feature in (
            ("bias_token_ids", {"bias_token_ids": (1,), "biases": (1.0,)}, "EXECUTOR_FEATURE_LOGIT_BIAS"),
            ("min_tokens", {"min_tokens": 1}, "EXECUTOR_FEATURE_MIN_TOKENS"),
            ("banned_until_min", {"banned_until_min": (1,)}, "EXECUTOR_FEATURE_MIN_TOKENS"),
            ("repetition_penalty", {"repetition_penalty": 1.5}, "EXECUTOR_FEATURE_PENALTIES"),
            ("presence_penalty", {"presence_penalty": 0.5}, "EXECUTOR_FEATURE_PENALTIES"),
            ("frequency_penalty", {"frequency_penalty": -0.5}, "EXECUTOR_FEATURE_PENALTIES"),
        )
    ),
    (
        "unrequired-logprobs",
        "R34",
        {"features": frozenset()},
        [],
        sampling(logprobs=0),
        f"{SAMPLING}.logprobs",
        "must be absent",
    ),
]
