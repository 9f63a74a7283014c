"""Room in the next step: how many bytes are left for sequences that enter it and for copies of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.kvmanager.scheduling.encoded_sizes import COLUMNS_BYTES, IdBytes
from pagekv.kvmanager.scheduling.step_plan import CopyList


@dataclass(slots=True)
class StepRoom:
    """Bytes of a step besides its columns, whose bytes include one copy for each sequence. So copies of partial hits,
    at most one for each sequence that enters, are listed without a check.
    """

    max_step_bytes: int
    max_running: int
    id_bytes: IdBytes
    # Copies that the next step has to make, so far, in order.
    copies: CopyList = field(default_factory=CopyList)
    # Bytes of the sequences that enter in the next step.
    entering: int = 0

    @property
    def whole(self) -> int:
        """Bytes of an empty step."""
        return self.max_step_bytes - COLUMNS_BYTES * self.max_running

    @property
    def left(self) -> int:
        """Bytes that are left; below 0 if one sequence takes more than a step has."""
        return self.whole - self.entering - self.id_bytes.copies(max(0, len(self.copies) - self.max_running))

    @property
    def copies_left(self) -> int:
        """Copies for which there are bytes left."""
        in_columns = max(0, self.max_running - len(self.copies))
        return in_columns + max(0, self.left) // self.id_bytes.copies(1)

    def take_copies(self) -> CopyList:
        """Takes the copies of the step just planned; the next step begins with all its room."""
        self.entering = 0
        return self.copies.take()
