"""Steps and an epoch to run them in, for tests of the executor without gRPC."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Any

from pagekv.executor.backend.interface import (
    LAYOUT,
    MAX_LOGPROBS,
    BackendFeature,
    BlockCopies,
    CopyDirection,
    Sampling,
    SequenceState,
)
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.session.attach_check import CONTRACT_REVISION, AttachOrder
from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.step_check import EpochLimits

EPOCH = 77
VOCAB = 512
ALL_FEATURES = frozenset(BackendFeature)


def new_sequence(seq_id: int, tokens: list[int], blocks: list[int], computed: int = 0, **fields: Any) -> SequenceState:
    """A new sequence that is all prompt, greedy; `fields` of SequenceState override."""
    values: dict[str, Any] = {
        "seq_id": seq_id,
        "token_ids": list(tokens),
        "num_prompt_tokens": len(tokens),
        "block_table": list(blocks),
        "computed_tokens": computed,
        "sampling": Sampling(),
    }
    return SequenceState(**{**values, **fields})


def attach_order(manager_id: str = "m", **fields: Any) -> AttachOrder:
    """An attachment of 8 blocks of 16 that requires no feature; `fields` override."""
    values: dict[str, Any] = {
        "block_size": 16,
        "num_device_blocks": 8,
        "num_host_blocks": 0,
        "layout": LAYOUT,
        "take_over": True,
        "required_features": (),
        "contract_revision": CONTRACT_REVISION,
    }
    return AttachOrder(manager_id, **{**values, **fields})


def memory_op(kind: CopyDirection | None, sources: list[int], destinations: list[int]) -> BlockCopies:
    """A memory operation."""
    return BlockCopies(kind, sources, destinations)


def checksum(backend: OracleBackend) -> str:
    """A digest of both pools."""
    digest = hashlib.sha256()
    for pool in (backend._device, backend._host):
        digest.update(pool.tobytes())
    return digest.hexdigest()


class World:
    """An epoch over an oracle with small pools."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_device_blocks: int = 32,
        num_host_blocks: int = 8,
        max_model_len: int = 64,
        max_sequences: int = 16,
        features: frozenset[BackendFeature] = ALL_FEATURES,
        failing: Container[int] = (),
    ) -> None:
        self.backend = OracleBackend(
            OracleModel(vocab_size=VOCAB, max_model_len=max_model_len), max_sequences=max_sequences, failing=failing
        )
        self.backend.allocate(block_size, num_device_blocks, num_host_blocks)
        limits = EpochLimits(
            block_size, num_device_blocks, num_host_blocks, VOCAB, max_model_len, max_sequences, MAX_LOGPROBS, features
        )
        self.epoch = Epoch(EPOCH, "test", limits, self.backend)

    def step(self, **columns: Any) -> Step:
        """The next step with these columns; `epoch` and `step` override."""
        return Step(**{"epoch": EPOCH, "step": self.epoch.next_step, **columns})

    def run(self, **columns: Any) -> ExecutedStep:
        """Runs the next step."""
        return self.epoch.launch(self.step(**columns)).collect()

    def enter(self, seq_id: int, tokens: list[int], blocks: list[int], count: int | None = None) -> ExecutedStep:
        """Runs a step in which one sequence enters and computes `count` tokens (all of them by default), and nobody
        else computes any."""
        seqs = [seq_id, *self.epoch.live]
        tokens_each = [len(tokens) if count is None else count, *(0 for _ in self.epoch.live)]
        return self.run(
            new_seqs=[new_sequence(seq_id, tokens, blocks)], scheduled_seqs=seqs, scheduled_tokens=tokens_each
        )

    def snapshot(self) -> tuple[object, ...]:
        """Everything a refused step must leave alone."""
        live = [
            (s.seq_id, tuple(s.token_ids), s.num_prompt_tokens, tuple(s.block_table), s.computed_tokens, s.sampling)
            for s in self.epoch.live.values()
        ]
        written = [self.epoch.written.of(block) for block in range(self.epoch.limits.num_device_blocks)]
        return checksum(self.backend), live, self.epoch.next_step, written
