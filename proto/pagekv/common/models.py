"""Finds a model by name (`demo`, a local directory, or a Hugging Face hub id) and checks that its files are there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from pagekv.common.phases import Phase, phase
from pagekv.common.safetensors_file import check_safetensors_file

DEMO = "demo"
_HUB_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
# The files that PageKV reads of a model repository; other weight formats would only cost time and disk.
_PATTERNS = ["*.json", "*.safetensors", "*.safetensors.index.json", "*.model", "*.txt", "*.jinja"]
CONFIG, WEIGHTS, WEIGHTS_INDEX, TOKENIZER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
)
# The first bytes of a Git LFS pointer: a file that git fetched without its content.
_LFS_POINTER = b"version https://git-lfs"
# Names of errors of the hub client and of the libraries below it, grouped by what they mean to a user.
_NOT_THERE = ("RepositoryNotFoundError", "RevisionNotFoundError")
_GATED = ("GatedRepoError",)
_UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout", "ConnectionError")


class ModelNotFound(Exception):
    """A model name leads nowhere, or to a directory that is not complete; the message says what to do."""


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """The directory of a model: the demo model for "demo", `name` itself if it is a directory, else the local copy of
    the hub model `name`, downloaded unless it is cached; without its weights unless `weights`. Raises ModelNotFound.
    """
    if name == DEMO:
        return _demo_directory()
    # os.path, because methods of Path raise for an unknown user or a directory without access, as another user's home.
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        _check_text(path)
        return path
    if not _HUB_ID.fullmatch(name) or os.path.exists(path):
        raise ModelNotFound(f"{name!r} is neither a model directory, nor '{DEMO}', nor a hub id like 'owner/model'")
    return _from_hub(name, weights)


def _check_text(directory: Path) -> None:
    """Raises ModelNotFound if the path is not UTF-8, because an executor sends it to its manager as text."""
    path = str(directory.resolve())
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ModelNotFound(
            f"{path!r} is not the path of a model directory in UTF-8: give it another name, or start in a "
            "locale of UTF-8, such as LC_ALL=C.UTF-8"
        ) from error


def check_model_files(directory: Path, *, weights: bool = True) -> None:
    """Finds faults in milliseconds that would otherwise end a start after many seconds: config.json is missing, is no
    JSON object or has a size in it that no model can have; with `weights`, weights are missing, completely or in part
    by their index, are pointers of Git LFS, or were copied in part. Raises ModelNotFound, which names the file and says
    what to do.
    """
    if not any(directory.iterdir()):
        raise ModelNotFound(f"{directory} is empty: it should hold a model's config.json, weights and tokenizer")
    if not (directory / CONFIG).is_file():
        raise ModelNotFound(
            f"{directory} has no {CONFIG}, so it is not a model directory: name the directory that has it"
            + _below(directory)
        )
    _check_sizes(directory / CONFIG)
    for path in _weight_files(directory) if weights else ():
        try:
            _check_weights(path)
        except OSError as error:
            raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelNotFound(str(error)) from error


def _check_sizes(path: Path) -> None:
    """Checks the sizes that every causal language model has. Null and lists are left to transformers, in which some
    model types have them. Raises ModelNotFound.
    """
    config = _read_object(path)
    nested = config.get("text_config")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = (nested if isinstance(nested, dict) else config).get(name)
        if not (value is None or isinstance(value, list) or (type(value) is int and value > 0)):
            raise ModelNotFound(f"{path}: {name} must be a whole number above 0, is {value!r:.80}; correct it")


def _check_weights(path: Path) -> None:
    """Raises ValueError, or OSError if the file cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not the weights: run git lfs pull in {path.parent}")
    check_safetensors_file(path)


def _below(directory: Path) -> str:
    """The end of a sentence that names subdirectories which look like models."""
    found = sorted(path.parent.name for path in directory.glob(f"*/{CONFIG}"))[:3]
    return f", such as {' or '.join(str(directory / name) for name in found)}" if found else ""


def _weight_files(directory: Path) -> list[Path]:
    """The files that transformers loads. Raises ModelNotFound where one is missing."""
    if (whole := directory / WEIGHTS).is_file():
        return [whole]
    index = directory / WEIGHTS_INDEX
    if not index.is_file():
        other = sorted(path.name for path in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.gguf"))
        instead = f" ({other[0]} is of another format)" if other else ""
        raise ModelNotFound(
            f"{directory} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX} is there{instead}; copy the model's "
            "safetensors files there"
        )
    parts = _read_object(index).get("weight_map")
    files = [directory / name for name in sorted({*map(str, parts.values())})] if isinstance(parts, dict) else []
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise ModelNotFound(
            f"{directory} lacks {len(missing)} of the {len(files)} files that {WEIGHTS_INDEX} names"
            f"{f', such as {missing[0]}' if missing else ''}: copy them there"
        )
    return files


def _read_object(path: Path) -> dict[str, Any]:
    """Raises ModelNotFound where the file is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    # JSON with thousands of nested levels raises RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} cannot be read as JSON: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ModelNotFound(f"{path}: must be a JSON object, got {type(found).__name__}; copy it again")
    return found


def _demo_directory() -> Path:
    # The client package carries the demo model; it is located, not imported: processes do not import each other.
    spec = importlib.util.find_spec("pagekv.client")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location) / "demo_model"
        if (directory / CONFIG).is_file():
            return directory
    raise ModelNotFound("the demo model is not installed: install all of pagekv, or name a model directory")


def _from_hub(name: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelNotFound(
            f"{name!r} is not a local directory, and fetching it from the hub needs: pip install huggingface-hub"
        ) from error
    patterns = _PATTERNS if weights else [pattern for pattern in _PATTERNS if not pattern.endswith(".safetensors")]
    with phase(f"fetching {name} from the hub") as fetching:
        try:
            return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=_bar_of(fetching)))
        except Exception as error:
            # The hub client raises errors of several libraries (its own, HTTP, operating system); all mean "not here".
            raise ModelNotFound(f"there is no directory {name!r} here, and {_hub_words(name, error)}") from error


def _bar_of(fetching: Phase) -> type:
    """A progress bar class for the hub client that draws nothing and reports to the phase."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # of a library without types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            # One bar counts bytes on disk; others count files, or bytes of the network, of which there may be fewer.
            self.counts = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts:
                fetching.progress(self.n, self.total or 0)

    return Bar


def _hub_words(name: str, error: BaseException) -> str:
    """Why the hub did not deliver the model and what to do, in words for users who do not know the libraries."""
    names = {type(each).__name__ for each in _chain(error)}
    if names.intersection(_GATED):
        return f"the hub's model {name!r} requires consent: give it at https://huggingface.co/{name}, and set HF_TOKEN"
    if names.intersection(_NOT_THERE):
        return f"the hub has no model {name!r}, or it is private: check the name, and set HF_TOKEN for a private model"
    if names.intersection(_UNREACHABLE):
        return "the hub cannot be reached, and no copy was fetched earlier: check the network, or name a directory"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"fetching it from the hub failed ({type(error).__name__}: {first}): try again, or name a directory"


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error, the error that it was raised from, and so on."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
