"""Reads a file of TOML that the operator writes: identities, tenants."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 2**20
# Mode bits that a secret file must not have: all except reading and writing by the owner, and reading by the group,
# which secrets in containers need.
FORBIDDEN_MODE = 0o037


class TomlFileError(ValueError):
    """The file cannot be used. The message is one line without control characters, with the field's path, the wanted
    and the given value; functions that read a whole file add the file's path.
    """


def read_toml(path: Path, *, secret: bool = False) -> dict[str, Any]:
    """The tables of a file. A `secret` file must not be open to other users. Raises TomlFileError."""
    text = _read(path, secret=secret)
    try:
        # Editors on Windows begin a file with a byte order mark.
        return tomllib.loads(text.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise TomlFileError(f"must be UTF-8, byte {error.start} is not") from error
    except RecursionError as error:
        raise TomlFileError("must be TOML with fewer nested levels") from error
    except ValueError as error:
        # Not only TOMLDecodeError: Python raises another ValueError for numbers of thousands of digits.
        raise TomlFileError(f"must be TOML: {_one_line(str(error))}") from error


def _read(path: Path, *, secret: bool) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe would block the process.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The status of the open file: a moment later the path may name another file.
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise TomlFileError("must be a regular file")
            mode = stat.S_IMODE(found.st_mode)
            if secret and mode & FORBIDDEN_MODE:
                raise TomlFileError(
                    f"must be writable only by its owner, and closed to others (chmod 640 or 600), has {mode:03o}"
                )
            with os.fdopen(file, "rb", closefd=False) as reader:
                text = reader.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(file)
    except OSError as error:
        raise TomlFileError(f"cannot be read: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise TomlFileError(f"must have at most {MAX_FILE_BYTES} bytes")
    return text


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)[:200]
