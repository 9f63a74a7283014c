"""Counts of the tokens a sequence has had, on the device, for sequences whose sampling needs them."""

from __future__ import annotations

import torch


class PenaltyTable:
    """One row of the vocabulary per sequence: how often each token was generated, and whether it was there at all.

    Tokens that steps sample are counted on the device, so that the host need not know them. Rows are given out by the
    host at once; the device sees each change in the order of the stream.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._free: list[int] = []
        # int32 [rows, vocab_size]: times generated. bool, as large: in the prompt or generated.
        self.outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def allocate(self) -> int:
        """A row for one sequence; `begin` must be the first to use it."""
        if not self._free:
            rows, vocab_size = self.outputs.shape
            added = max(4, rows)
            self.outputs = torch.cat([self.outputs, self.outputs.new_zeros(added, vocab_size)])
            self.seen = torch.cat([self.seen, self.seen.new_zeros(added, vocab_size)])
            self._free = list(range(rows + added - 1, rows - 1, -1))
        return self._free.pop()

    def free(self, row: int) -> None:
        """Frees a row; steps already launched still find it as it was."""
        self._free.append(row)

    def begin(self, rows: torch.Tensor, of_row: torch.Tensor, tokens: torch.Tensor, generated: torch.Tensor) -> None:
        """Fills fresh rows `[n]`: sequence of row `of_row[i]` has had token `tokens[i]`, `generated[i]` (0 or 1) times
        more among its output. Index tensors are int64, `generated` int32.
        """
        self.outputs[rows] = 0
        self.seen[rows] = False
        self.outputs.index_put_((of_row, tokens), generated, accumulate=True)
        self.seen[of_row, tokens] = True

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """The sequence of each row, all different, has generated one more token."""
        self.outputs[rows, tokens] += 1
        self.seen[rows, tokens] = True
