"""Keys of what --json prints: scripts read them, so they are added, never renamed nor taken away."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pagekv import client as types
from pagekv.client.planning.load_test import LoadReport

# Command to the keys of its objects by the path where they stand; "[]" is an entry of a list.
PROMISED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parents[3] / "data" / "json_keys.json").read_text()
)
SHOWN: dict[str, dict[str, type[Any]]] = {
    "model": {"": types.ModelInfo},
    "stats": {"": types.Stats},
    "lookup": {"": types.PrefixLookup},
    "explain": {"": types.PrefixExplanation, "blocks[]": types.BlockExplanation},
    "blocks": {"": types.BlockList, "blocks[]": types.BlockInfo},
    "requests": {"": types.RequestList, "requests[]": types.RequestInfo},
    "block-table": {"sequences[]": types.SequenceBlocks},
    "pin": {"": types.Pin},
    "reset-cache": {"": types.CacheReset},
    "generate": {"completions[]": types.Completion},
    "bench": {"report": LoadReport},
}


@pytest.mark.parametrize("command", SHOWN)
def test_promised_keys_are_there(command: str) -> None:
    assert PROMISED[command].keys() == SHOWN[command].keys()
    for path, cls in SHOWN[command].items():
        missing = {*PROMISED[command][path]} - {field.name for field in fields(cls)}
        assert not missing, f"{command} {path}"


def test_every_command_is_judged() -> None:
    assert PROMISED.keys() == SHOWN.keys()
