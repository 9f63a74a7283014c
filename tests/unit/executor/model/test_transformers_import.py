"""The imports of torch and transformers without the compiler and what belongs to it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.clients.stack import environment
from support.executor.cpu_driver import save_model

from pagekv.executor.model import transformers_import

HEAVY = ("torch._dynamo", "torch._meta_registrations", "torch.distributed.tensor", "sympy")
# In a process of its own, as an executor starts.
START = f"""
import sys
from pagekv.executor.model.torch_import import import_torch
import_torch()
from pagekv.executor.model.transformers_import import import_transformers
import_transformers()
import pathlib, torch
from pagekv.executor.cpu.choose_forward import load_forward
load_forward(pathlib.Path(sys.argv[1]), torch.float32, fused=True)
assert not [name for name in {HEAVY} if name in sys.modules]
assert torch.distributed.is_available()
from transformers.utils.import_utils import create_import_structure_from_path
lists = create_import_structure_from_path.cache_info()
assert lists.misses == lists.currsize > 128, lists
linear = torch.compile(lambda x: 2 * x + 1, backend="eager", fullgraph=True)
assert linear(torch.ones(2)).tolist() == [3, 3]
"""


def test_a_start_loads_no_compiler_no_meta_kernels_no_distributed_tensors_and_lists_once(tmp_path: Path) -> None:
    """With a Llama, which the demo is. The compiler can be used afterwards. No folder's list is made twice."""
    save_model("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of this process, as if neither transformers nor the compiler were among them."""
    modules = {name: module for name, module in sys.modules.items() if not name.startswith("transformers")}
    modules.pop("torch._dynamo", None)
    monkeypatch.setattr(sys, "modules", modules)
    return modules


def test_marks_leave_functions_as_they_are(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]) -> None:
    available = torch.distributed.is_available()
    seen: list[object] = []

    def load(name: str) -> None:
        compiler = modules["torch._dynamo"]
        marked = (
            compiler.disable(load),
            compiler.disable(recursive=False)(load),
            compiler.disable(load, True, wrapping=False),
        )
        seen.append((*marked, compiler.is_compiling(), hasattr(compiler, "__wrapped__")))
        assert not torch.distributed.is_available()

    monkeypatch.setattr(importlib, "import_module", load)
    transformers_import.import_transformers()
    assert seen == [(load, load, load, False, False)] * 3
    assert "torch._dynamo" not in modules
    assert torch.distributed.is_available() == available


def test_ranks_have_distributed_tensors_and_no_compiler(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]
) -> None:
    available, seen = torch.distributed.is_available(), []

    def load(name: str) -> None:
        seen.append(torch.distributed.is_available() == available and "torch._dynamo" in modules)

    monkeypatch.setattr(importlib, "import_module", load)
    transformers_import.import_transformers(distributed=True)
    assert seen == [True] * 3


def test_where_marks_do_not_suffice_the_next_import_loads_all(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]
) -> None:
    available, asked = torch.distributed.is_available(), []

    def load(name: str) -> None:
        asked.append(name)
        raise TypeError("no class to derive from")

    monkeypatch.setattr(importlib, "import_module", load)
    transformers_import.import_transformers()
    assert len(asked) == 1
    assert "torch._dynamo" not in modules
    assert torch.distributed.is_available() == available


def test_what_was_loaded_before_stays(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]) -> None:
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    loaded = modules["torch._dynamo"] = ModuleType("torch._dynamo")
    transformers_import.import_transformers()
    assert modules["torch._dynamo"] is loaded
    assert len(asked) == 3
    modules["transformers.modeling_utils"] = ModuleType("transformers.modeling_utils")
    transformers_import.import_transformers()
    assert len(asked) == 3
