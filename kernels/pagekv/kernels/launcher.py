"""The interface of launchers: CuPy on a GPU, or the tests' emulation on the CPU."""

from __future__ import annotations

from typing import Protocol

from pagekv.kernels.params import Struct
from pagekv.kernels.variants import Variant


class Launcher(Protocol):
    """Starts kernels. Callers have validated all arguments; addresses in `params` are the device's."""

    def launch(
        self,
        kernel: str,
        variant: Variant,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: Struct,
    ) -> None:
        """Starts `kernel` (a name of `variants.KERNELS`) on the current stream and returns without waiting for it.

        `grid`: thread blocks in x, y, z, each at least 1. `threads`: threads of a block, a multiple of 32.
        `shared_bytes`: dynamic shared memory of a block. `params`: the kernel's structure, from `params.fill`.
        """
        ...
