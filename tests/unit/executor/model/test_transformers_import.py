"""The imports of torch and transformers without the compiler and what belongs to it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.clients.stack import environment
from support.executor.cpu_driver import save_model

from pagekv.executor.model import transformers_import

HEAVY = (
    *("torch._dynamo", "torch._meta_registrations", "torch.distributed.tensor"),
    *("torch.nn.attention.flex_attention", "sympy"),
)
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


def has_flex() -> bool:
    """As transformers' function tells with a torch that has flex attention."""
    return True


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules from which transformers' own modules import that function."""
    names = ("transformers.utils", "transformers.utils.import_utils")
    return {name: SimpleNamespace(is_torch_flex_attn_available=has_flex) for name in names}


@pytest.fixture
def import_by(monkeypatch: pytest.MonkeyPatch, telling: dict[str, Any]) -> ImportBy:
    """Replaces the import of all other modules by a function of their name."""

    def replace(load: Callable[[str], object]) -> None:
        monkeypatch.setattr(importlib, "import_module", lambda name: telling.get(name) or load(name))

    return replace


ImportBy = Callable[[Callable[[str], object]], None]


def test_marks_leave_functions_as_they_are(
    import_by: ImportBy, modules: dict[str, ModuleType], telling: dict[str, Any]
) -> None:
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
        assert not any(module.is_torch_flex_attn_available() for module in telling.values())

    import_by(load)
    transformers_import.import_transformers()
    assert seen == [(load, load, load, False, False)] * 3
    assert "torch._dynamo" not in modules
    assert torch.distributed.is_available() == available
    assert all(module.is_torch_flex_attn_available is has_flex for module in telling.values())


def test_ranks_have_distributed_tensors_and_no_compiler(import_by: ImportBy, modules: dict[str, ModuleType]) -> None:
    available, seen = torch.distributed.is_available(), []

    def load(name: str) -> None:
        seen.append(torch.distributed.is_available() == available and "torch._dynamo" in modules)

    import_by(load)
    transformers_import.import_transformers(distributed=True)
    assert seen == [True] * 3


def test_the_stand_in_marks_nothing(modules: dict[str, ModuleType]) -> None:
    """Device meshes of torch 2.14 use one of its functions as a context."""

    def function() -> None: ...

    with transformers_import.without_compiler():
        compiler: Any = modules["torch._dynamo"]
        assert compiler.disable(function) is compiler.disable(recursive=False)(function) is function
        assert compiler.is_compiling() is False
        with compiler.disable_nested_graph_breaks():
            pass
    assert "torch._dynamo" not in modules


def test_where_marks_do_not_suffice_the_next_import_loads_all(
    import_by: ImportBy, modules: dict[str, ModuleType], telling: dict[str, Any]
) -> None:
    available, asked = torch.distributed.is_available(), []

    def load(name: str) -> None:
        asked.append(name)
        raise TypeError("no class to derive from")

    import_by(load)
    transformers_import.import_transformers()
    assert len(asked) == 1
    assert "torch._dynamo" not in modules
    assert torch.distributed.is_available() == available
    assert all(module.is_torch_flex_attn_available is has_flex for module in telling.values())


def test_a_release_without_flex_attention_gets_no_function_for_it(
    import_by: ImportBy, modules: dict[str, ModuleType], telling: dict[str, Any]
) -> None:
    asked: list[str] = []
    for module in telling.values():
        del module.is_torch_flex_attn_available
    import_by(asked.append)
    transformers_import.import_transformers()
    assert len(asked) == 3
    assert not any(hasattr(module, "is_torch_flex_attn_available") for module in telling.values())


def test_what_was_loaded_before_stays(import_by: ImportBy, modules: dict[str, ModuleType]) -> None:
    asked: list[str] = []
    import_by(asked.append)
    loaded = modules["torch._dynamo"] = ModuleType("torch._dynamo")
    transformers_import.import_transformers()
    assert modules["torch._dynamo"] is loaded
    assert len(asked) == 3
    modules["transformers.modeling_utils"] = ModuleType("transformers.modeling_utils")
    transformers_import.import_transformers()
    assert len(asked) == 3
