"""An executor of your own in Python: one class, which PageKV's executor serves by the contract of steps.

python docs/examples/python_backend.py 127.0.0.1:50056, and in another terminal
pagekv-conformance --executor 127.0.0.1:50056. To begin with an engine of yours: what blocks hold, and `logits`.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import numpy.typing as npt

from pagekv.executor.backend.interface import (
    SAMPLER,
    BackendDescription,
    BackendFeature,
    BlockCopies,
    CopyDirection,
    Finished,
    Launch,
    Scheduled,
    SequenceState,
)
from pagekv.executor.backend.row_sampler import sample_row
from pagekv.executor.server import serve_backend

VOCAB, MAX_LEN, POOL_BYTES = 512, 2**14, 2**22
# What a slot holds: the token, where a model has keys and values.
SLOT = np.dtype(np.uint32)


class ToyBackend:
    """A `Backend`. Everything that a step may get wrong has been refused before a method is called."""

    device = host = np.zeros((0, 1), SLOT)

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """What the manager plans with. A real one measures what memory is left beside a step of `token_budget`."""
        return BackendDescription(
            model_id="",  # or a directory or hub id, whose tokenizer the manager then uses
            model_fingerprint=hashlib.sha256(f"toy {VOCAB}".encode()).hexdigest(),
            num_layers=1,
            num_kv_heads=1,
            head_size=1,
            kv_dtype=SLOT.name,
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            bytes_per_block=block_size * SLOT.itemsize,
            device_kv_bytes=POOL_BYTES,
            host_kv_bytes=POOL_BYTES,
            layout="toy-1",
            backend="toy",
            eos_token_ids=(0,),
            max_sequences=256,
            versions={"numpy": np.__version__},
            features=tuple(BackendFeature),
            sampler=SAMPLER,
        )

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.device = np.zeros((num_device_blocks, block_size), SLOT)
        self.host = np.zeros((num_host_blocks, block_size), SLOT)

    def copy_blocks(self, copies: BlockCopies) -> None:
        source = self.host if copies.direction is CopyDirection.SWAP_IN else self.device
        destination = self.host if copies.direction is CopyDirection.SWAP_OUT else self.device
        destination[copies.destinations] = source[copies.sources]

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        """All writes come before all reads, as in each layer of a model: sequences may share blocks in a step."""
        for item in scheduled:
            positions = np.arange(item.start, item.start + item.count)
            blocks, offsets = np.divmod(positions, self.device.shape[1])
            table = np.array(item.state.block_table)
            self.device[table[blocks], offsets] = item.state.token_ids[item.start : item.start + item.count]
        sampling = [item.state for item in scheduled if item.samples]
        return Finished({state.seq_id: sample_row(self.logits(state), state) for state in sampling})

    def logits(self, state: SequenceState) -> npt.NDArray[np.float64]:
        """The model: it reads a sequence through the block table alone, as attention does. Shape [VOCAB]."""
        read = self.device[state.block_table].reshape(-1)[: len(state.token_ids)]
        digest = hashlib.sha256(read.tobytes()).digest()
        return np.random.default_rng(list(digest)).normal(scale=4, size=VOCAB)

    def finish(self, states: list[SequenceState]) -> None:
        """Nothing is kept of a sequence but its blocks."""

    def is_lost(self, error: Exception) -> bool:
        """A GPU that is dead to this process is; memory never."""
        return False


if __name__ == "__main__":
    sys.exit(serve_backend(ToyBackend, *sys.argv[1:2]))
