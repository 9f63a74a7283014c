"""`--backend oracle` without a model: what it has to be told of a tokenizer that the manager alone is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagekv.client.launcher.child_flags import flag_value
from pagekv.common.models import DEMO, ModelNotFound, resolve_model

# Of --tokenizer: as the executor's model has it, or none.
_NO_NAMES = ("", "auto", "none")


def is_bare_oracle(executor_args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the executor pretends a model of no name, which brings no tokenizer."""
    return flag_value("backend", executor_args, env) == "oracle" and not flag_value("model", executor_args, env)


def tokenizer_name(manager_args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The tokenizer that the manager is given by name; None for none."""
    name = flag_value("tokenizer", manager_args, env)
    return None if name is None or name in _NO_NAMES else name


def vocabulary_args(executor_args: Sequence[str], manager_args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """--vocab-size for an oracle that has no model and is given none, as the manager's tokenizer has it."""
    name = tokenizer_name(manager_args, env)
    given = flag_value("vocab-size", executor_args, env)
    if name is None or given is not None or not is_bare_oracle(executor_args, env):
        return []
    if name != DEMO and not Path(name).expanduser().is_dir():
        return []  # the manager fetches it, and says so; nothing waits for that here
    try:
        size = _vocabulary(resolve_model(name, weights=False))
    except (ModelNotFound, OSError, ValueError, KeyError, TypeError, AttributeError):
        # The manager reads it as well, and says what is wrong with it.
        return []
    return [f"--vocab-size={size}"]


def _vocabulary(directory: Path) -> int:
    """One more than the highest id in tokenizer.json, whose vocabulary is a map to ids or, in Unigram, a list."""
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    highest: int = max([*ids, *(token["id"] for token in data.get("added_tokens", ()))])
    return highest + 1
