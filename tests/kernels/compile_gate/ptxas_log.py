"""The assembler's report on a kernel (`--ptxas-options=-v`): registers, spills, stack, static shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel: registers, and bytes. Stack and spills are local memory, that is device memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    """Static shared memory of a thread block."""

    @property
    def local(self) -> int:
        """Bytes of local memory touched: 0 for a kernel that holds everything in registers."""
        return self.stack + self.spill_stores + self.spill_loads


ENTRY = re.compile(r"Compiling entry function '")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def warns(line: str) -> bool:
    """Whether a line is a warning, or says that the assembler made code slower than it is written: matrix products in a
    row, registers of a warpgroup that stay as they are."""
    return "warning" in line or "Potential Performance Loss" in line


def parse(log: str) -> dict[str, Usage]:
    """Usage of every kernel named in a log. Raises ValueError where the log lacks one of its numbers."""
    usage: dict[str, Usage] = {}
    for section in ENTRY.split(log)[1:]:
        name, _, lines = section.partition("'")
        registers, shared = USED.search(lines), SHARED.search(lines)
        # A function that was not inlined has its own frame after the kernel's; the kernel spills in both.
        frames = [tuple(map(int, frame)) for frame in FRAME.findall(lines)]
        if registers is None or not frames:
            raise ValueError(f"the assembler's log says nothing of {name}'s registers or spills")
        stack, stores, loads = (sum(column) for column in zip(*frames, strict=True))
        usage[name] = Usage(int(registers[1]), stack, stores, loads, int(shared[1]) if shared else 0)
    return usage
