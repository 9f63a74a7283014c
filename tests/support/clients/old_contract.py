"""The contract before it got its lasting names and places: messages of its stubs, beside the present ones."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

STUBS = Path(__file__).resolve().parents[2] / "data" / "old_stubs"
# A file comes after those that it imports.
FILES = ("types", "inference_service", "cache_service", "executor_service")


@cache
def pool() -> DescriptorPool:
    """The old contract alone. The stubs themselves would put it into the pool that the present one is in."""
    found = DescriptorPool()
    for name in FILES:
        for node in ast.walk(ast.parse((STUBS / f"{name}_pb2.py").read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
                found.AddSerializedFile(ast.literal_eval(node.args[0]))
    return found


def messages() -> dict[str, Descriptor]:
    """Every message of the old contract, by full name."""
    files = [pool().FindFileByName(f"pagekv/v1/{name}.proto") for name in FILES]
    return {message.full_name: message for file in files for message in file.message_types_by_name.values()}


def message(name: str) -> Any:
    """The class of a message of pagekv.v1, as the old stubs had it."""
    return GetMessageClass(pool().FindMessageTypeByName(f"pagekv.v1.{name}"))
