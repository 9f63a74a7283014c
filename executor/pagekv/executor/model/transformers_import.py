"""The import of transformers without what PageKV never uses: half of its time, and much of its memory.

Decorators load torch's compiler, and through that SymPy, only to mark functions for it; and classes of distributed
tensors are loaded where torch could be distributed. Here everything runs eagerly and in one process. The files of all
models would be read twice to list what is in them, since transformers remembers the lists of 128 folders.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import torch.distributed

_COMPILER = "torch._dynamo"
# Modules that load both, directly or not. A model's own module loads what it needs on top.
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto.modeling_auto")

# The function that lists what is in the files of a folder.
_LISTS = "create_import_structure_from_path"


def import_transformers(*, whole: bool = False) -> None:
    """Imports what models are made of. To be called before transformers is imported in another way: afterwards it
    changes nothing. If a version of transformers asks for more than marks, the next import loads all of it. `whole`:
    nothing is left out, for models that are split over ranks.
    """
    if "transformers.modeling_utils" in sys.modules or whole:
        return
    with without_compiler(), _not_distributed(), _models_listed_once(), suppress(Exception):
        for name in _MODULES:
            importlib.import_module(name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """A stand-in for torch's compiler, whose own modules can be imported nevertheless. Nothing changes where it was
    imported before. The answer to whether a compiler runs is no.
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
        # torch imports the compiler itself when it is asked for next.
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
    """A module of decorators that leave functions as they are, and of questions with the answer no."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no if name.startswith("is_") else _unmarked


def _unmarked(*args: Any, **options: Any) -> Any:
    """The function, for a decorator; or the decorator, where it is given options alone."""
    return args[0] if args and callable(args[0]) else _unmarked


def _no(*args: Any, **options: Any) -> bool:
    return False
