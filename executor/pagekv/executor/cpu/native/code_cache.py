"""Machine code of compiled loops, kept between processes in a folder of the user.

The folder is named after the sources: Numba itself would take what is old where a function's own file is unchanged and
one that it uses is not. Each function has a folder of its own below, named after the numbers in its closure and the
processor: where two share an index to which two processes write at once, Numba may store the code of one as that of the
other. Nobody else may write there, since the code is run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from pagekv.common.logs import Log

log = Log(__name__)

# Of the loops of a model together, with room to spare: 1 MB is kept of the demo model.
_ROOM_BYTES = 4 * 2**20


def compile_kept(compile: Callable[..., Any], work: Callable[..., None]) -> Any:
    """`compile(work, cache=True)`, which finds what an earlier process kept, or keeps it; where nothing can be kept, or
    what was kept cannot be read, `compile(work, cache=False)`. Closures of `work` hold only numbers and types.
    """
    folder = code_folder()
    if isinstance(folder, str):
        return compile(work, cache=False)
    values = [cell.cell_contents for cell in work.__closure__ or ()]
    key = repr((values, cpu_target.target_context.codegen().magic_tuple()))
    own = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(own)
    try:
        return compile(work, cache=True)
    # Full disks; files that a crash of the machine cut short, which pickle tells in any way.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        log.warning("compiled loops are not kept", folder=str(own), error=f"{type(error).__name__}: {first_line}")
        shutil.rmtree(own, ignore_errors=True)
        return compile(work, cache=False)
    finally:
        numba.config.CACHE_DIR = before


@cache
def code_folder() -> Path | str:
    """Where code is kept: below NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache. The reason in words where that cannot be
    written, or is not the user's alone.
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
    # A user without a home is a RuntimeError.
    except (OSError, RuntimeError) as error:
        log.warning("compiled loops are not kept: each start compiles them anew", error=str(error))
        return str(error)
    return folder


def _check_room(folder: Path) -> None:
    """Raises OSError where the code has no room, as on a full disk: only a file that is written tells."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM_BYTES))


def when_compiled() -> str:
    """Such as "once: ...", for the one who waits for the compiler. Empty where code has been kept already, which most
    often is all that is needed.
    """
    folder = code_folder()
    if isinstance(folder, str):
        return f"at every start, since they cannot be kept: {folder}"
    return "" if any(folder.iterdir()) else f"once: they are kept in {folder}"
