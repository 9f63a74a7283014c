"""The version of this installation."""

from __future__ import annotations

# Of a checkout that is run as it is, with nothing installed.
UNINSTALLED = "0+checkout"


def pagekv_version() -> str:
    """Such as "0.1.0"."""
    # Imported here: this module comes before all others, and importing metadata takes 50 ms.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pagekv")
    except PackageNotFoundError:
        return UNINSTALLED
