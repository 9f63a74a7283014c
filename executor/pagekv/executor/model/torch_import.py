"""Imports torch, with threads that spin briefly, and without its meta kernels in Python, which are hardly ever needed.

A kernel of the meta device computes the shape of an operator's result and nothing else. transformers creates models on
that device before it loads their weights. torch has such kernels in C++, and replaces most of them by functions in
Python, for the sake of its compiler. The import of these takes a sixth of torch's, and the first call of one imports
SymPy, which takes longer still. Operators that have no such kernel in C++ raise NotImplementedError; only few models
use one when they are created.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import spec_from_loader
from types import ModuleType

from pagekv.executor.machine import shorten_spinning

# The newest release of torch that was tried without them. Later ones, which may need them for their own import, are
# imported as they are.
NEWEST_TRIED = (2, 14)
_META_KERNELS = "torch._meta_registrations"
# Modules that import each other in a circle, which is left unharmed only if the meta kernels come first. torch's
# compiler, its distributed tensors, vmap and fake tensors import one of them.
_CIRCLE = ("torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store")


def import_torch(*, meta_kernels: bool = False) -> None:
    """Imports torch; does nothing if it is imported already. `meta_kernels`: with those in Python, too, as distributed
    tensors need them.
    """
    if "torch" in sys.modules:
        return
    # OpenMP's runtime, which comes with torch, reads the time to spin only once.
    shorten_spinning()
    if meta_kernels or _release() > NEWEST_TRIED:
        importlib.import_module("torch")
        return
    sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)
    try:
        torch = importlib.import_module("torch")
        del torch._meta_registrations
    finally:
        # When it is needed, the real one is imported.
        del sys.modules[_META_KERNELS]
    sys.meta_path.insert(0, _MetaKernelsFirst())


def _release() -> tuple[int, ...]:
    """The first two numbers of the installed torch's version; () if it is not installed."""
    try:
        return tuple(int(number) for number in version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ()


def import_meta_kernels() -> bool:
    """Imports the meta kernels in Python. False if they were imported before."""
    if _META_KERNELS in sys.modules:
        return False
    importlib.import_module(_META_KERNELS)
    return True


class _MetaKernelsFirst(MetaPathFinder, Loader):
    """Imports the meta kernels when a module of the circle is imported. That imports the module, too."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname in _CIRCLE and _META_KERNELS not in sys.modules:
            return spec_from_loader(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        import_meta_kernels()
        module = sys.modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # importlib has put its spec of this loader there. The module itself has been executed.
        module.__spec__ = self._spec
