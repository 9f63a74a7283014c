"""The user's configuration file of `pagekv`: the manager that commands call, and the credentials for it."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pagekv.client.cli.parser import UsageError

KEYS = ("target", "api_key", "ca", "client_cert", "client_key")
# Keys whose values are files; a relative path is relative to the folder of the configuration file.
_FILES = ("ca", "client_cert", "client_key")
# Mode bits that give others than the owner access to a file.
OTHERS = 0o077


def config_path(env: Mapping[str, str]) -> Path:
    """The path of the file, whether it exists or not."""
    folder = env.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a path that is not absolute.
    return Path(folder if os.path.isabs(folder) else os.path.expanduser("~/.config"), "pagekv", "config.toml")


def read_config(path: Path) -> dict[str, str]:
    """The values of the file by key; empty if there is no file, or if a folder on its path is closed to this user.
    Raises UsageError, which shows no value.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # Editors on Windows begin a file with a byte order mark.
            found = tomllib.loads(file.read().decode().removeprefix("\ufeff"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        # In a folder closed to this user, such as the home that `sudo -u` leaves in HOME, the file is somebody else's.
        if isinstance(error, PermissionError) and not os.path.exists(path):
            return {}
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    for key, value in found.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise UsageError(f"{path}: no key {key!r}; {hint}")
        if not isinstance(value, str) or not value:
            given = "is empty" if isinstance(value, str) else f"is a {type(value).__name__}"
            raise UsageError(f"{path}: {key}: must be text, {given}")
    if "api_key" in found and mode & OTHERS:
        raise UsageError(f"{path}: has an api_key, and others than its owner may open it: chmod 600 {path}")
    return {key: str(path.parent / os.path.expanduser(v)) if key in _FILES else v for key, v in found.items()}
