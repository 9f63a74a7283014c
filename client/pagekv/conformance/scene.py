"""The epoch that a bad step comes into: two live sequences, and then the step, whose refusal is looked at.

Sequence 1 has computed all its tokens, in blocks 0 to 4; sequence 2 the first of its tokens, with blocks 5 and 6. A bad
step says nothing of them unless it is about them, so each of them would compute one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc

from pagekv.conformance.kit import Kit, expect
from pagekv.conformance.played import neutral
from pagekv.conformance.target import NUM_BLOCKS, NUM_HOST_BLOCKS
from pagekv.conformance.verdict import NotTested, during, require
from pagekv.steps.v1 import executor_service_pb2 as pb

# The block of a sequence that enters in a bad step, and the first of those that nobody has.
NEW_BLOCK, FREE_BLOCK = 9, 10
HUGE = 2**32 - 1


@dataclass(frozen=True, slots=True)
class LiveScene:
    """The sizes that bad steps are made by."""

    kit: Kit
    num_blocks: int = NUM_BLOCKS

    @property
    def size(self) -> int:
        return self.kit.target.block_size

    @property
    def vocab(self) -> int:
        return int(self.kit.description.vocab_size)

    @property
    def max_len(self) -> int:
        return int(self.kit.description.max_model_len)

    @property
    def max_blocks(self) -> int:
        return self.kit.target.max_blocks

    @property
    def prompts(self) -> tuple[list[int], list[int]]:
        """Of sequences 1 and 2."""
        prompts = self.kit.answers.prompts
        return prompts[1], prompts[0]

    @property
    def written(self) -> int:
        """The block that sequence 1 writes next."""
        return len(self.prompts[0]) // self.size

    def entering(self, **fields: Any) -> dict[str, Any]:
        """A step in which sequence 9 enters with three tokens and computes one."""
        return {"new_seqs": [new_sequence(**fields)]}

    def idle(self, **fields: Any) -> dict[str, Any]:
        """The same, but it computes nothing."""
        return {**self.entering(**fields), "scheduled_seqs": [9], "scheduled_tokens": [0]}


def new_sequence(**fields: Any) -> pb.NewSequence:
    values: dict[str, Any] = {
        "seq_id": 9,
        "token_ids": [0, 0, 0],
        "num_prompt_tokens": 3,
        "block_ids": [NEW_BLOCK],
        "sampling": neutral(),
    }
    values.update(fields)
    return pb.NewSequence(**values)


Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step that breaks one rule. `fields`: any of which may be named. `features`: those required, all by default.

    `needs`: a feature without which it cannot be tried; the host pool has blocks where that is the feature.
    `rules`: any of which may be named, where the step breaks several.
    """

    words: str
    columns: Columns | Callable[[LiveScene], Columns]
    fields: Sequence[str]
    needs: int = 0
    features: tuple[int, ...] | None = None
    num_blocks: Callable[[LiveScene], int] | None = None
    first: bool = False
    rules: Sequence[str] = ()

    def check(self, kit: Kit, rule: str) -> None:
        """Raises BrokenRule where the step is not refused as it should be, and NotTested."""
        if self.needs:
            kit.need(self.needs)
        scene = LiveScene(kit)
        if self.num_blocks is not None:
            scene = LiveScene(kit, max(NUM_BLOCKS, self.num_blocks(scene)))
            if scene.num_blocks > kit.target.pool_blocks:
                raise NotTested(f"needs {scene.num_blocks} blocks, the pool has {kit.target.pool_blocks}")
        hosts = NUM_HOST_BLOCKS if self.needs == pb.EXECUTOR_FEATURE_HOST_POOL else 0
        with during(self.words):
            columns = self.columns(scene) if callable(self.columns) else self.columns
            epoch = kit.target.attach(num_blocks=scene.num_blocks, host_blocks=hosts, features=self.features)
            with closing(kit.target.run()) as call:
                if not self.first:
                    call.send(_prelude(scene, epoch))
                # A message that is made of bytes keeps the fields that nobody knows.
                bad = pb.StepRequest(**{"epoch": epoch, "step": 2, **columns})
                call.send(pb.StepRequest.FromString(bad.SerializeToString()))
                if not self.first:
                    _check_prelude(scene, call.result())
                expect(call.refusal(), grpc.StatusCode.INVALID_ARGUMENT, self.rules or (rule,), self.fields)


def _prelude(scene: LiveScene, epoch: int) -> pb.StepRequest:
    """The first step: both sequences enter."""
    seqs = [
        new_sequence(seq_id=seq_id, token_ids=tokens, num_prompt_tokens=len(tokens), block_ids=table)
        for seq_id, tokens, table in zip((1, 2), scene.prompts, (range(5), range(5, 7)), strict=True)
    ]
    first = len(scene.prompts[0])
    return pb.StepRequest(epoch=epoch, step=1, new_seqs=seqs, scheduled_seqs=[1], scheduled_tokens=[first])


def _check_prelude(scene: LiveScene, result: pb.StepResult) -> None:
    answer = scene.kit.answers.of(scene.prompts[0])
    require(list(result.sampled_seqs) == [1], f"the step before sampled {list(result.sampled_seqs)}")
    right = list(result.sampled_tokens) == answer.tokens[:1] or not answer.is_clear(0)
    require(right, "the step before it, in a new epoch, has another token than ever")
