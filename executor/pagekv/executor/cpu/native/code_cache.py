"""Machine code of compiled loops, kept between processes in a folder of the user.

The folder's name is a digest of all sources of this package. Numba itself compares only a function's own file, so it
would use old code after a change in another file that the function uses.

In that folder each function has its own, named by a digest of its name, the values in its closure and the processor. If
two functions shared Numba's index and two processes wrote to it at once, Numba could store the code of one function as
that of the other. Nobody but the user may write to these folders, because the code is run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from pagekv.common.logs import Log

log = Log(__name__)

# Room for the code of all loops of a model, with some to spare: the demo model's takes 1 MB.
_ROOM_BYTES = 4 * 2**20

# Folders whose loops could not be kept since `note_compiled` was last called.
_not_kept: list[Path] = []


def compile_kept(compile: Callable[..., Any], work: Callable[..., None]) -> Any:
    """`compile(work, cache=True)`, which loads the code that an earlier process kept, or compiles and keeps it. If no
    code can be kept, or the kept code cannot be read: `compile(work, cache=False)`. The closure of `work` holds only
    numbers and types.
    """
    folder = code_folder()
    if isinstance(folder, str):
        return compile(work, cache=False)
    values = [cell.cell_contents for cell in work.__closure__ or ()]
    own = folder / _digest((work.__module__, work.__qualname__, values))
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(own)
    try:
        return compile(work, cache=True)
    # Such as a full disk; or a file that a crash of the machine cut short, for which pickle raises any exception.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        log.warning("compiled loops are not cached", folder=str(own), error=f"{type(error).__name__}: {first_line}")
        shutil.rmtree(own, ignore_errors=True)
        _not_kept.append(own)
        return compile(work, cache=False)
    finally:
        numba.config.CACHE_DIR = before


@cache
def code_folder() -> Path | str:
    """The folder for code, below NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache. If it cannot be written to, or others can
    write to it: the reason, in words.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        caches = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches) / "pagekv" / f"loops-{digest.hexdigest()[:16]}"
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.stat().st_uid != os.getuid() or each.stat().st_mode & 0o022:
                raise PermissionError(f"{each} can be written by others")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
        if not any(folder.iterdir()):
            _check_room(folder)
    # Path.home() raises RuntimeError for a user without a home.
    except (OSError, RuntimeError) as error:
        log.warning("compiled loops are not cached: each start compiles them again", error=str(error))
        return str(error)
    return folder


def _check_room(folder: Path) -> None:
    """Raises OSError if there is no room for the code, as on a full disk. Only writing a file shows that."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM_BYTES))


def when_compiled(model: str) -> str:
    """A phrase for a user who waits for the compiler: how often that happens, and why. Empty if the loops of this model
    were compiled and kept before, for a processor like this one. `model`: what its loops depend on, as text.
    """
    folder = code_folder()
    if isinstance(folder, str):
        return f"at every start, because they cannot be cached: {folder}"
    return "" if _mark(folder, model).exists() else f"once: they are cached in {folder}"


def note_compiled(model: str) -> None:
    """Notes for `when_compiled` that the loops of this model are compiled, and whether all of them are kept."""
    folder = code_folder()
    if isinstance(folder, Path):
        mark = _mark(folder, model)
        # Only a phrase depends on it.
        with suppress(OSError):
            if _not_kept:
                mark.unlink(missing_ok=True)
            else:
                mark.touch(0o600)
    _not_kept.clear()


def _mark(folder: Path, model: str) -> Path:
    return folder / f"model-{_digest(model)}"


def _digest(what: object) -> str:
    """A name for something compiled for this processor: homes are shared between machines."""
    key = repr((what, cpu_target.target_context.codegen().magic_tuple()))
    return hashlib.sha256(key.encode()).hexdigest()[:16]
