"""Counts what a step starts on a GPU: kernels of PageKV, and operators of torch that start one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagekv.kernels.launch_config import LaunchConfig, Launcher
from pagekv.kernels.params import Struct
from pagekv.kernels.variants import Variant

# Memory is given, and nothing is started.
_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided")


class CountingLauncher:
    """A launcher that counts by name what another one starts; without another, kernels start nothing."""

    def __init__(self, launcher: Launcher | None) -> None:
        self._launcher = launcher
        self.counts: Counter[str] = Counter()

    def silence(self) -> None:
        """From now on kernels start nothing."""
        self._launcher = None

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        """As `Launcher.launch`."""
        self.counts[kernel] += 1
        if self._launcher is not None:
            self._launcher.launch(kernel, variant, config, params)


class CountingOperators(TorchDispatchMode):
    """Counts operators that write or make a tensor in memory of its own; views start nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        writes = any(returned.alias_info and returned.alias_info.is_write for returned in func._schema.returns)
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = any(isinstance(leaf, torch.Tensor) and _memory(leaf) not in given for leaf in tree_leaves(out))
        if (writes or made) and name not in _ALLOCATIONS:
            self.counts[name] += 1
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
