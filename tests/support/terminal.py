"""A stream that says that it is a terminal."""

from __future__ import annotations

import io


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True
