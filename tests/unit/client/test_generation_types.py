"""Options and results of generating beside the messages of the contract."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

from pagekv.client import CacheControls, Chunk, Completion, GenerateOptions, generation_types
from pagekv.kvmanager.api import validation
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


def test_options_are_the_fields_of_the_request_and_the_clients_own() -> None:
    sampling = {field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields}
    own = {"cache", "adapter", "priority", "request_id", "timeout", "resume_timeout"}
    assert {*GenerateOptions.__annotations__} == sampling - {"n"} | own


def test_every_option_may_be_none() -> None:
    """For type checkers, as at run time: an option of a caller's own is often None by default."""
    hints = get_type_hints(GenerateOptions)
    assert [name for name, kind in hints.items() if type(None) not in get_args(kind)] == []


def test_every_option_says_its_bounds() -> None:
    documented = inspect.getdoc(GenerateOptions) or ""
    for name, kind in get_type_hints(GenerateOptions).items():
        (text,) = re.findall(rf"(?m)^{name}: ((?:.|\n    )+)", documented)
        if kind not in (bool | None, CacheControls | None):
            assert re.search(r"\d+ to |up to|at most", text), name


def test_the_bounds_of_numbers_are_those_that_the_manager_checks() -> None:
    documented = inspect.getdoc(GenerateOptions) or ""
    for name, bounds in validation._BOUNDS.items():
        (text,) = re.findall(rf"(?m)^{name}: ((?:.|\n    )+)", documented)
        if name == "beam_width":
            # 0 is told apart: no beam search.
            bounds = 1, bounds[1]
        words = "above {:g} and up to {:g}" if name in validation._ABOVE else "{:g} to {:g}"
        assert words.format(*bounds) in text, name


def test_every_option_has_its_documentation_below_it() -> None:
    """As string literals, which editors show."""
    (module,) = ast.parse(inspect.getsource(generation_types.GenerateOptions)).body
    assert isinstance(module, ast.ClassDef)
    names = [
        (key.target, text.value)
        for key, text in zip(module.body[1::2], module.body[2::2], strict=True)
        if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr)
    ]
    assert [name.id for name, _ in names if isinstance(name, ast.Name)] == [*GenerateOptions.__annotations__]
    assert all(isinstance(text, ast.Constant) and isinstance(text.value, str) for _, text in names)


@pytest.mark.parametrize(
    ("cls", "message", "own"),
    [
        (Chunk, pb.GenerateChunk, {"request_id", "finish_reason"}),
        (Completion, pb.GenerateComplete, {"request_id", "resumes"}),
    ],
)
def test_results_have_the_fields_of_their_messages(cls: type, message: type, own: set[str]) -> None:
    descriptor = message.DESCRIPTOR  # type: ignore[attr-defined]  # of every generated class
    assert {field.name for field in fields(cls)} - own == {field.name for field in descriptor.fields}
