"""Imports torch without its meta kernels in Python, which PageKV hardly ever needs.

A kernel of the meta device computes the shape of an operator's result and nothing else. transformers creates models on
that device before it loads their weights. torch has such kernels in C++, and replaces most of them by functions in
Python, for the sake of its compiler. The import of these takes a sixth of torch's, and the first call of one imports
SymPy, which takes longer still. Operators that have no such kernel in C++ raise NotImplementedError; only few models
use one when they are created.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"


def import_torch(*, meta_kernels: bool = False) -> None:
    """Imports torch; does nothing if it is imported already. `meta_kernels`: with meta kernels in Python, as
    distributed tensors need them.
    """
    if "torch" in sys.modules:
        return
    if meta_kernels:
        importlib.import_module("torch")
        return
    sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)
    try:
        torch = importlib.import_module("torch")
        del torch._meta_registrations
    finally:
        # When it is needed, the real one is imported.
        del sys.modules[_META_KERNELS]
    sys.meta_path.insert(0, _BeforeCompiler())


def import_meta_kernels() -> bool:
    """Imports the meta kernels in Python. False if they were imported before."""
    if _META_KERNELS in sys.modules:
        return False
    importlib.import_module(_META_KERNELS)
    return True


class _BeforeCompiler(MetaPathFinder):
    """Imports the meta kernels before torch's compiler: without them its own import fails."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "torch._dynamo":
            import_meta_kernels()
