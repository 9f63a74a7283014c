"""Files replaced as a whole: a reader finds the old content or the new one, whenever it looks."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Writes the file with this mode, new or in the place of the one that is there, whose owner it keeps. Raises
    OSError, and the file is then as it was.
    """
    # A link leads to the same file as before.
    path = path.resolve()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            with suppress(FileNotFoundError):
                before = path.stat()
                made = os.fstat(descriptor)
                if (before.st_uid, before.st_gid) != (made.st_uid, made.st_gid):
                    # A server reads a file of its own user, and root may be the one that adds to it.
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
