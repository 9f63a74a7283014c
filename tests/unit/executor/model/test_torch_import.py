"""The import of torch without its meta kernels in Python."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.clients.stack import environment
from support.executor.cpu_driver import MODELS, save_config
from support.executor.families import FAMILIES, family_config

from pagekv.executor.model import torch_import
from pagekv.executor.model.loading import load_model
from pagekv.executor.model.torch_import import import_meta_kernels, import_torch

# Imports and calls that import the meta kernels first; test_transformers_import tries torch's compiler.
FIRST = ("import torch.distributed.tensor", "torch.vmap(torch.sin)(torch.ones(2))")
# Modules of the circle that users import by way of others. The same finder answers for them.
CIRCLE = ("import torch._refs", "import torch._prims")
# Each in a process of its own, forked from one that has imported torch.
ALL_WORKS = """
import os, sys
from pagekv.executor.model.torch_import import import_torch
import_torch()
import torch
assert "torch._meta_registrations" not in sys.modules
for first in sys.argv[1:]:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, first
        continue
    exec(first)
    assert "torch._meta_registrations" in sys.modules
    import torch._decomp
    assert len(torch._decomp.decomposition_table) > 500
    assert torch._decomp.__spec__.origin.endswith("__init__.py")
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        assert torch.where(torch.ones(2) > 0, torch.ones(2), torch.zeros(3, 2)).shape == (3, 2)
    os._exit(0)
"""
# Creating it takes an operator that has no meta kernel in C++.
TAKES_THEM = "apertus"
NAMES = tuple(dict.fromkeys([*MODELS, *FAMILIES]))
QUICK = ("llama", "gpt2", "gemma3_text", TAKES_THEM)
# In a process of its own, as an executor starts. The models that take kernels in Python come last, since these stay.
LOAD = """
import sys
from pagekv.executor.model.torch_import import import_torch
import_torch()
from pagekv.executor.model.transformers_import import import_transformers
import_transformers()
import pathlib, torch
from pagekv.executor.model.loading import load_model
for name in sys.argv[2:]:
    directory = pathlib.Path(sys.argv[1], name)
    model = load_model(directory, torch.float32).model
    torch.save({**dict(model.named_parameters()), **dict(model.named_buffers())}, directory / "loaded.pt")
    print(name, "torch._meta_registrations" in sys.modules)
"""


# All models every night, where a new torch or transformers shows: the quick ones have every way that an import takes.
@pytest.mark.parametrize("names", [QUICK, pytest.param(NAMES, marks=pytest.mark.nightly)], ids=["quick", "all"])
def test_models_are_the_same_with_and_without_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    order = [*(name for name in names if name != TAKES_THEM), TAKES_THEM]
    for name in order:
        save_config(MODELS[name]() if name in MODELS else family_config(name), tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), *order],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{name} {name == TAKES_THEM}" for name in order]
    for name in order:
        there = torch.load(tmp_path / name / "loaded.pt")
        model = load_model(tmp_path / name, torch.float32).model
        here = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert here.keys() == there.keys(), name
        for key, tensor in here.items():
            assert torch.equal(tensor, there[key]), f"{key} of {name}"


@pytest.mark.parametrize("first", [FIRST, pytest.param(CIRCLE, marks=pytest.mark.nightly)], ids=["used", "circle"])
def test_all_of_torch_works_afterwards(first: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_WORKS, *first], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store"])
def test_each_module_of_the_circle_has_the_finder(name: str, modules: dict[str, ModuleType]) -> None:
    assert "torch._meta_registrations" not in modules
    spec = torch_import._MetaKernelsFirst().find_spec(name)
    assert spec is not None
    assert isinstance(spec.loader, torch_import._MetaKernelsFirst)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of this process, as if torch were not among them, and finders of them as they are."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "torch"}
    monkeypatch.setattr(sys, "modules", modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return modules


@pytest.mark.parametrize(("release", "meta_kernels"), [("2.100.0a0+git1", False), ("2.13.0+cpu", True)])
def test_it_is_imported_whole_if_it_was_not_tried_or_if_asked_for(
    release: str, meta_kernels: bool, monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]
) -> None:
    before, finders, asked = list(modules), list(sys.meta_path), list[tuple[str, bool]]()
    monkeypatch.setattr(importlib, "import_module", lambda name: asked.append((name, list(modules) == before)))
    monkeypatch.setattr(torch_import, "version", lambda name: {"torch": release}[name])
    import_torch(meta_kernels=meta_kernels)
    assert asked == [("torch", True)]
    assert sys.meta_path == finders


def test_torch_that_cannot_be_imported_leaves_no_stand_in(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]
) -> None:
    def load(name: str) -> None:
        raise ImportError(name)

    before, finders = list(modules), list(sys.meta_path)
    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ImportError, match="torch"):
        import_torch()
    assert list(modules) == before
    assert sys.meta_path == finders


def test_torch_and_kernels_that_are_there_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._meta_registrations")
    finders = list(sys.meta_path)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(name))
    import_torch()
    assert not import_meta_kernels()
    assert sys.meta_path == finders
