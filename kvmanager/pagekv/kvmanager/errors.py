"""Errors inside the manager itself. Errors for clients are in `pagekv.common.errors`."""

from __future__ import annotations


class InvariantError(RuntimeError):
    """The manager's own state is inconsistent: a bug, reported with the numbers."""
