"""The version of this installation."""

from __future__ import annotations

# The version of a checkout that runs without being installed.
UNINSTALLED = "0+checkout"


def pagekv_version() -> str:
    """The version, such as "0.1.0"; UNINSTALLED in a checkout that is not installed."""
    # Imported here: this module comes before all others, and importing metadata takes 50 ms.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pagekv")
    except PackageNotFoundError:
        return UNINSTALLED
