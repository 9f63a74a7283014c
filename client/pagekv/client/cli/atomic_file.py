"""Replaces files atomically: a reader always finds either the old content or the new content."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Writes the file with this mode. An existing file is replaced, and its owner is kept. Raises OSError; the file is
    then unchanged.
    """
    # A symbolic link is followed, so it still points to the same file afterwards.
    path = path.resolve()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            with suppress(FileNotFoundError):
                before = path.stat()
                made = os.fstat(descriptor)
                if (before.st_uid, before.st_gid) != (made.st_uid, made.st_gid):
                    # The file may belong to the user of a server, while root adds to it.
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
