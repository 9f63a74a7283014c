"""The contract before it got its lasting names and places, of commit 5f0170a: its messages beside the present ones.

`tests/data/old_contract.binpb` has the descriptors of its stubs, as a FileDescriptorSet.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

STORED = Path(__file__).resolve().parents[2] / "data" / "old_contract.binpb"


@cache
def files() -> list[FileDescriptor]:
    """The old contract in a pool of its own. The stubs themselves would put it into that of the present one."""
    pool, stored = DescriptorPool(), FileDescriptorSet.FromString(STORED.read_bytes()).file
    for file in stored:
        pool.Add(file)
    return [pool.FindFileByName(file.name) for file in stored]


def messages() -> dict[str, Descriptor]:
    """Every message of the old contract, by full name."""
    return {message.full_name: message for file in files() for message in file.message_types_by_name.values()}


def message(name: str) -> Any:
    """The class of a message of pagekv.v1, as the old stubs had it."""
    return GetMessageClass(messages()[f"pagekv.v1.{name}"])
