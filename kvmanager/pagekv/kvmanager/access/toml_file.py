"""Reads a file of TOML that the operator writes: identities, tenants."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 2**20
# Everything but reading and writing by the owner and reading by the group, which secrets of containers have.
FORBIDDEN_MODE = 0o037


class TomlFileError(ValueError):
    """The file cannot be used: one line with the field's path, what is wanted and what is there, and without control
    characters that it quotes; from those that read a whole file also with its path.
    """


def read_toml(path: Path, *, secret: bool = False) -> dict[str, Any]:
    """The tables of a file; where it is `secret`, nobody else may change or read it. Raises TomlFileError."""
    text = _read(path, secret=secret)
    try:
        return tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise TomlFileError(f"must be UTF-8, has another byte at {error.start}") from error
    except RecursionError as error:
        raise TomlFileError("must be TOML of few levels") from error
    except ValueError as error:
        # Of any kind: Python refuses numbers of thousands of digits by an error of its own.
        raise TomlFileError(f"must be TOML: {_one_line(str(error))}") from error


def _read(path: Path, *, secret: bool) -> bytes:
    try:
        # Without O_NONBLOCK a named pipe would hold up the process here.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Of the file that was opened: the one at this path may be another a moment later.
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise TomlFileError("must be a regular file")
            mode = stat.S_IMODE(found.st_mode)
            if secret and mode & FORBIDDEN_MODE:
                raise TomlFileError(
                    f"must be closed to others, and to its group but for reading (chmod 640 or 600), has {mode:03o}"
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
