"""Imports transformers without the parts that PageKV never uses, which take half of the time and much memory.

Some decorators load torch's compiler, and with it SymPy, only to mark functions for compilation; and transformers loads
classes of distributed tensors if torch.distributed is available. It also loads torch's flex attention, which imports
SymPy since torch 2.14. PageKV runs everything eagerly, with attention of its own, and, without ranks, in one process;
ranks do use distributed tensors. Also, transformers lists the contents of every model's files twice, because it caches
the lists of only 128 folders; during the import here, the cache has no bound.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

import torch.distributed

_COMPILER = "torch._dynamo"
# Modules whose import loads both, directly or not. A model's own module loads the rest later.
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto.modeling_auto")

# transformers' function that tells whether flex attention is available, and the modules from which others import it.
_HAS_FLEX, _UTILS = "is_torch_flex_attn_available", ("transformers.utils", "transformers.utils.import_utils")
# transformers' function that lists the contents of a folder's files.
_LISTS = "create_import_structure_from_path"


def import_transformers(*, distributed: bool = False) -> None:
    """Imports the modules that models are built from. Call it before any other import of transformers; afterwards it
    does nothing. If a version of transformers needs more than the stand-ins provide, the next import loads everything.
    `distributed`: with distributed tensors, for models that are split over ranks.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    parts = nullcontext() if distributed else _not_distributed()
    with suppress(Exception), without_compiler(), parts, _models_listed_once(), _no_flex_attention():
        for name in _MODULES:
            importlib.import_module(name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Puts a stand-in in the place of torch's compiler, unless the compiler is imported already. The compiler's
    submodules can still be imported. The stand-in says that nothing is being compiled.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = _Marks(_COMPILER)
    stand_in.__path__ = [f"{torch.__path__[0]}/_dynamo"]
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        # When the compiler is needed next, torch imports the real one.
        del sys.modules[_COMPILER]


@contextmanager
def _not_distributed() -> Iterator[None]:
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


@contextmanager
def _no_flex_attention() -> Iterator[None]:
    spaces = [vars(importlib.import_module(name)) for name in _UTILS]
    # A release of transformers without the function needs none in its place.
    found = [(names, names[_HAS_FLEX]) for names in spaces if _HAS_FLEX in names]
    for names, _ in found:
        names[_HAS_FLEX] = lambda: False
    try:
        yield
    finally:
        for names, function in found:
            names[_HAS_FLEX] = function


@contextmanager
def _models_listed_once() -> Iterator[None]:
    lru_cache = functools.lru_cache

    def without_bound(*args: Any, **options: Any) -> Any:
        if args and getattr(args[0], "__name__", "") == _LISTS:
            return functools.cache(args[0])
        return lru_cache(*args, **options)

    functools.lru_cache = without_bound
    try:
        yield
    finally:
        functools.lru_cache = lru_cache


class _Marks(ModuleType):
    """A module whose attributes are marks, or `is_...` functions that return False."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no if name.startswith("is_") else _MARK


class _Mark(nullcontext[None]):
    """A decorator that returns the function unchanged, and a context without effect; called with options only, it
    returns itself.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


_MARK = _Mark()


def _no(*args: Any, **options: Any) -> bool:
    return False
