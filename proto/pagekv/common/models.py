"""Where a model is: `demo`, a local directory, or a Hugging Face hub id."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DEMO = "demo"
_HUB_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
# The files that PageKV reads of a model repository; other weight formats would only cost time and disk.
_PATTERNS = ["*.json", "*.safetensors", "*.safetensors.index.json", "*.model", "*.txt", "*.jinja"]


class ModelNotFound(Exception):
    """A model name leads nowhere; the message says what to do."""


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """The directory of a model: the demo model for "demo", `name` itself if it is a directory, else the local copy of
    the hub model `name`, downloaded unless it is cached; without its weights unless `weights`. Raises ModelNotFound.
    """
    if name == DEMO:
        return _demo_directory()
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name) or path.exists():
        raise ModelNotFound(f"{name!r} is neither a model directory, nor '{DEMO}', nor a hub id like 'owner/model'")
    return _from_hub(name, weights)


def _demo_directory() -> Path:
    # The client package carries the demo model; it is located, not imported: processes do not import each other.
    spec = importlib.util.find_spec("pagekv.client")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location) / "demo_model"
        if (directory / "config.json").is_file():
            return directory
    raise ModelNotFound("the demo model is not installed: install the whole of pagekv, or name a model directory")


def _from_hub(name: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"{name!r} is not a local directory, and fetching it from the hub needs: pip install huggingface-hub"
        ) from error
    patterns = _PATTERNS if weights else [pattern for pattern in _PATTERNS if not pattern.endswith(".safetensors")]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        # The hub client raises errors of several libraries (its own, HTTP, operating system); all mean "not here".
        raise ModelNotFound(
            f"{name!r} is not a local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {error}). Check the name, the network and, for gated models, HF_TOKEN; "
            f"or name a directory that holds the model"
        ) from error
