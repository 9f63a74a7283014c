"""A folder for temporary files of this process. The folders of processes that were killed are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# Seconds for which a new folder may be without its lock.
NEW_S = 60.0


class OwnFolder:
    """Below TMPDIR. States: there → removed.

    An open folder is locked, and the kernel unlocks it when its process ends, however that happens. A folder on a file
    system without locks may be removed while it is in use, by a later process of this user.
    """

    def __init__(self, prefix: str) -> None:
        """Makes the folder; its name begins with `prefix`, which no other program's folders have. Raises OSError."""
        _remove_left(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int | None:
    """A descriptor of the folder, locked; None where it is locked already, or cannot be."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened


def _remove_left(parent: Path, prefix: str) -> None:
    """Removes this user's folders that no process has locked. Others' are not opened, because TMPDIR may be shared."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < NEW_S:
                continue
            if (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
