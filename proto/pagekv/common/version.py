"""The version of this installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# Of a checkout that is run as it is, with nothing installed.
UNINSTALLED = "0+checkout"


def pagekv_version() -> str:
    """Such as "0.1.0"."""
    try:
        return version("pagekv")
    except PackageNotFoundError:
        return UNINSTALLED
