"""Each rule of what steps mean notices an executor that breaks it, by tokens alone: the toy judges nothing."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from support.executor.judged import BACKEND, ToyFault, assert_noticed, broken, served_backend, verdicts

from pagekv.executor.backend.interface import CopyDirection

HASHED = "repr((read, *seeds))"
APPENDED = "zip(step.append_seqs, step.append_blocks"
PAIRS = "zip(op.sources, op.destinations, strict=True)"
COPY = "self.pool[destination] = list(self.pool[source])"
WRITTEN = "for at in range(state.computed, state.computed + counts[seq]):\n                self.pool"
READ_ALL = "for at in range(state.computed)]"
LAST_ONE = "state.new.computed_tokens * (len(state.tokens) == state.new.computed_tokens + 1)"
SAMPLING = "        for seq, state in self.live.items():\n            if counts[seq] and"
LATE = "        for source, destination in late:\n            self.pool[destination] = list(self.pool[source])\n"
ADVANCE = "            state.computed += counts[seq]\n"
STEPS = "        self.steps += 1\n"
# The rule alone sends a step behind one with which a second sequence enters, before that one's result has come.
FORGETFUL = """\
                result, ahead = mine.run(step), None
                if step.new_seqs and len(mine.live) > 1:
                    ahead = asyncio.ensure_future(anext(incoming, None))
                    await asyncio.wait([ahead])
                    for seq in result.sampled_seqs:
                        mine.live[seq].tokens[-1] = 0
                yield result
"""

SAMPLED = """\
                result.sampled_seqs.append(seq)
                state.tokens.append(self.next_token(state))
                result.sampled_tokens.append(state.tokens[-1])
"""
# From the second token on: so no rule has an answer of more than one token to hold others against.
GIVES_UP = """\
                if len(state.tokens) <= len(state.new.token_ids):
                    result.sampled_seqs.append(seq)
                    result.sampled_tokens.append(self.next_token(state))
                elif len(state.tokens) == len(state.new.token_ids) + 1:
                    result.failed_seqs.append(seq)
                    result.failed_reasons.append(pb.SEQUENCE_FAILURE_NOT_A_NUMBER)
                state.tokens.append(result.sampled_tokens[-1] if seq in result.sampled_seqs else 0)
"""

FAULTS = [
    ToyFault("M2", "sequences are given up without a reason", ((SAMPLED, GIVES_UP),)),
    ToyFault("M1", "the model sees block ids", ((HASHED, "repr((read, state.table[0], *seeds))"),)),
    ToyFault(
        "M2",
        "later chunks begin one token late",
        ((WRITTEN, WRITTEN.replace("(state.computed,", "(state.computed + (1 < counts[seq] < state.computed),")),),
    ),
    ToyFault(
        "M3",
        "blocks are appended last first",
        ((f"{APPENDED}, strict=True)", f"[*{APPENDED})][::-1]"),),
    ),
    ToyFault("M3", "computed_tokens is not taken", ((", self.new.computed_tokens", ", 0"),)),
    ToyFault("M3", "others' blocks are not read", ((READ_ALL, READ_ALL.replace("(", "(state.new.computed_tokens, ")),)),
    ToyFault(
        "M3",
        "a sequence samples before later ones have written",
        ((ADVANCE + SAMPLING, ADVANCE + "            if counts[seq] and"),),
    ),
    ToyFault(
        "M3",
        "a sequence that enters with one token left reads that alone",
        ((READ_ALL, READ_ALL.replace("(", f"({LAST_ONE}, ")),),
    ),
    ToyFault("M4", "COPY is skipped", ((COPY, "pass"),)),
    ToyFault("M4", "a block is copied once in an operation", ((PAIRS, f"dict({PAIRS}).items()"),)),
    ToyFault("M4", "a copy is the block itself", ((COPY, "self.pool[destination] = self.pool[source]"),)),
    ToyFault("M6", "tokens depend on when it entered", ((HASHED, "repr((read, len(state.new.token_ids), *seeds))"),)),
    ToyFault("M7", "step-mates leak", ((HASHED, "repr((read, len(self.live), *seeds))"),)),
    ToyFault("M7", "two results are swapped", (("sampled_seqs.append(seq)", "sampled_seqs.insert(0, seq)"),)),
    ToyFault(
        "M8",
        "a token is not known before its result is out",
        (
            ("                yield mine.run(step)\n", FORGETFUL),
            ("mine, read = None, None", "mine, read, ahead = None, None, None"),
            ("read = asyncio", "read = ahead or asyncio"),
        ),
    ),
    ToyFault(
        "M10",
        "copies run after the computation",
        (
            (COPY, "late.append((source, destination))"),
            (STEPS, STEPS + "        late = []\n"),
            (SAMPLING, LATE + SAMPLING),
        ),
    ),
    ToyFault(
        "M11",
        "a token is sampled one step early",
        (("state.computed == len(state.tokens)", "state.computed >= len(state.tokens) - 1"),),
    ),
    ToyFault("M12", "sitting out computes", (("state.computed += counts[seq]", "state.computed += counts[seq] or 1"),)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_faults_are_noticed(fault: ToyFault) -> None:
    assert_noticed(fault)


@pytest.mark.parametrize("last", list(CopyDirection), ids=lambda kind: kind.name)
def test_operations_grouped_by_their_kind_are_noticed(last: CopyDirection) -> None:
    """Operations of one kind run behind those of the others."""
    backend = runpy.run_path(str(BACKEND))["ToyBackend"]()
    copy_blocks, launch = backend.copy_blocks, backend.launch
    late: list[Any] = []

    def copied(copies: Any) -> None:
        if copies.direction is last:
            late.append(copies)
        else:
            copy_blocks(copies)

    def launched(scheduled: Any) -> Any:
        while late:
            copy_blocks(late.pop(0))
        return launch(scheduled)

    backend.copy_blocks, backend.launch = copied, launched
    with served_backend(backend) as address:
        found = broken(verdicts(address, "M3", "M4", "M5", "M10"))
    assert list(found) == ["M10"]
    assert found["M10"].startswith("over blocks of one step's SWAP_OUT, COPY, SWAP_IN and COPY, in this order: ")


def test_one_host_block_that_comes_back_once_is_noticed() -> None:
    backend = runpy.run_path(str(BACKEND))["ToyBackend"]()
    copy_blocks = backend.copy_blocks

    def copied(copies: Any) -> None:
        pairs = dict(zip(copies.sources, copies.destinations, strict=True))
        once = copies.direction is CopyDirection.SWAP_IN
        copy_blocks(type(copies)(copies.direction, list(pairs), list(pairs.values())) if once else copies)

    backend.copy_blocks = copied
    with served_backend(backend) as address:
        assert list(broken(verdicts(address, "M4", "M5"))) == ["M5"]
