"""Counts of each sequence's tokens, on the device, for sequences whose sampling has penalties."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, SequenceState
from pagekv.executor.cuda.step_sampling import Find
from pagekv.kernels.tensors import Ints


class Penalised(Protocol):
    """A live sequence, which stores the row of the table that it was given."""

    state: SequenceState
    penalty_row: int | None


class PenaltyTable:
    """One row per sequence, one column per token: how often the token was generated, and whether it is in the prompt or
    output at all.

    Sampled tokens are counted on the device, because the host does not know them yet. The host allocates rows at once;
    the device sees each change in stream order.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._free: list[int] = []
        # int32 [rows, vocab_size]: times generated. bool [rows, vocab_size]: in the prompt or generated.
        self.outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def allocate(self) -> int:
        """Allocates a row for one sequence; `begin` must fill it before any other use."""
        if not self._free:
            rows, vocab_size = self.outputs.shape
            added = max(4, rows)
            self.outputs = torch.cat([self.outputs, self.outputs.new_zeros(added, vocab_size)])
            self.seen = torch.cat([self.seen, self.seen.new_zeros(added, vocab_size)])
            self._free = list(range(rows + added - 1, rows - 1, -1))
        return self._free.pop()

    def free(self, row: int) -> None:
        """Frees a row. Steps that are already launched still see its old content."""
        self._free.append(row)

    def begin(self, rows: torch.Tensor, of_row: torch.Tensor, tokens: torch.Tensor, generated: torch.Tensor) -> None:
        """Fills the new rows `rows` `[n]`. Each i is one token of the past: the sequence of row `of_row[i]` has token
        `tokens[i]`, in its output if `generated[i]` is 1, in its prompt if 0. Index tensors are int64, `generated`
        int32.
        """
        self.outputs[rows] = 0
        self.seen[rows] = False
        self.outputs.index_put_((of_row, tokens), generated, accumulate=True)
        self.seen[of_row, tokens] = True

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts one more generated token for the sequence of each row; the rows are distinct."""
        self.outputs[rows, tokens] += 1
        self.seen[rows, tokens] = True


class StepPenalties:
    """The rows of the table for one step's sequences, including those that begin in this step."""

    def __init__(self, table: PenaltyTable) -> None:
        self._table = table
        # The rows that begin in this step; and for each, (row, token, times generated) of its past tokens, [n, 3].
        self._fresh: list[int] = []
        self._past: list[Ints] = []

    def row_of(self, entry: Penalised) -> int:
        """The sequence's row, allocated at the first call. Raises RuntimeError if the host does not know all of its
        tokens then.
        """
        if entry.penalty_row is None:
            state = entry.state
            tokens = np.asarray(state.token_ids, np.int32)
            if (tokens == UNKNOWN_TOKEN).any():
                raise RuntimeError(f"sequence {state.seq_id} entered with a token that is not known yet")
            row = entry.penalty_row = self._table.allocate()
            self._fresh.append(row)
            past = np.empty((len(tokens), 3), np.int32)
            past[:, 0], past[:, 1] = row, tokens
            past[:, 2] = np.arange(len(tokens)) >= state.num_prompt_tokens
            self._past.append(past)
        return entry.penalty_row

    def sections(self) -> dict[str, Ints]:
        if not self._fresh:
            return {}
        return {"fresh": np.array(self._fresh, np.int32), "past": np.concatenate(self._past)}

    def begin(self, find: Find) -> None:
        """Enqueues the filling of the new rows."""
        if self._fresh:
            past = find("past", (sum(map(len, self._past)), 3)).long()
            self._table.begin(find("fresh", (len(self._fresh),)).long(), past[:, 0], past[:, 1], past[:, 2].int())
