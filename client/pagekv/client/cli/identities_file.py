"""The manager's identities file: keys and certificates of callers, and their roles.

It contains no key, only the SHA-256 of each key: a key has 256 random bits, so no slow hash is needed against guesses.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pagekv.client.cli.atomic_file import replace_file
from pagekv.client.errors import PageKVError

# The file's name in a directory of certificates.
IDENTITIES = "identities.toml"
ROLES = ("generate", "observe", "operate")
# The role of callers that may name other tenants.
ACT_FOR = "act-for"
# Sections of the file; each has one table per caller, by name.
KEYS, CERTIFICATES = "keys", "certificates"
# The section, and the name, of callers that come through a gateway.
GATEWAY = "gateway"
# All sections of the file; `jwt`, which says how tokens are checked, names no caller.
SECTIONS = (KEYS, CERTIFICATES, GATEWAY, "jwt")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
# Mode of a new file: only the manager may read the names of callers.
_MODE = 0o600


class ListedIdentity(NamedTuple):
    """A caller in the file. `kind` is the name of its section without the plural s; `tenant` is the tenant of its
    calls.
    """

    name: str
    kind: str
    roles: tuple[str, ...]
    tenant: str


def is_name(text: str) -> bool:
    """Whether a caller can have this name, which TOML allows as a bare key."""
    return _NAME.fullmatch(text) is not None


def list_identities(path: Path) -> list[ListedIdentity]:
    """The callers in the order of the file, keys first. Raises PageKVError."""
    return list(_identities(path, _parse(path, _read(path))))


def add_key(
    path: Path, name: str, key: str, roles: Sequence[str], tenant: str = "", act_for: Sequence[str] = ()
) -> None:
    """Adds a key to the file, and creates the file if there is none; the rest of its text is unchanged. `tenant` is the
    tenant of the caller's calls, if empty a tenant with the caller's name; `act_for` are tenants that it may name
    instead. Raises PageKVError, also if a caller has the name already.
    """
    # Not by Path.exists, which raises where the folder may not be looked into: to write then fails by name.
    text = _read(path) if os.path.exists(path) else ""
    if any(each.name == name for each in _identities(path, _parse(path, text))):
        raise PageKVError(f"{path}: has a caller {name!r} already: remove its section first, or choose another name")
    lines = [f"[{KEYS}.{name}]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"', f"roles = {_quoted(roles)}"]
    lines += [f'tenant = "{tenant}"'] if tenant else []
    lines += [f"act_for = {_quoted(act_for)}"] if act_for else []
    _write(path, text, lines)


def add_certificate(path: Path, name: str, subject: str, roles: Sequence[str]) -> None:
    """Creates the file, with one certificate. Raises PageKVError."""
    _write(path, "", [f"[{CERTIFICATES}.{name}]", f'subject = "{subject}"', f"roles = {_quoted(roles)}"])


def _quoted(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _write(path: Path, text: str, lines: list[str]) -> None:
    """Writes the file: this text, followed by a section with these lines."""
    text += "" if not text or text.endswith("\n") else "\n"
    text += ("\n" if text else "") + "\n".join(lines) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # For example if all keys are in one inline table.
        raise PageKVError(f"{path}: takes no section {lines[0]} at its end: {error}") from error
    try:
        replace_file(path, text.encode(), path.stat().st_mode & 0o777 if path.exists() else _MODE)
    except OSError as error:
        raise PageKVError(f"{path}: cannot be written: {error.strerror}") from error


def _read(path: Path) -> str:
    # A named pipe would be waited for.
    if os.path.exists(path) and not os.path.isfile(path):
        raise PageKVError(f"{path}: must be a regular file")
    try:
        # Editors on Windows begin a file with a byte order mark, which TOML has not.
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise PageKVError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PageKVError(f"{path}: is not UTF-8 text") from error


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    # Not only TOMLDecodeError: numbers of thousands of digits, and thousands of nested levels, raise others.
    except (ValueError, RecursionError) as error:
        raise PageKVError(f"{path}: is not TOML: {error}") from error


def _identities(path: Path, found: dict[str, Any]) -> Iterator[ListedIdentity]:
    for section in found:
        if section not in SECTIONS:
            raise PageKVError(f"{path}: {section!r} is no section of this file: a caller is a table [{KEYS}.NAME]")
    for section in (KEYS, CERTIFICATES, GATEWAY):
        callers = found.get(section, {})
        if not isinstance(callers, dict):
            raise PageKVError(f"{path}: {section}: must be a table, is a {type(callers).__name__}")
        if section == GATEWAY and section in found:
            callers = {section: callers}
        for name, caller in callers.items():
            roles = caller.get("roles", []) if isinstance(caller, dict) else None
            if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
                field = section if section == GATEWAY else f"{section}.{name}"
                raise PageKVError(f"{path}: {field}: must be a table with roles, a list of names")
            yield ListedIdentity(name, section.removesuffix("s"), tuple(roles), str(caller.get("tenant", name)))
