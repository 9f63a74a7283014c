"""The error of a launcher."""

from __future__ import annotations


class StackError(Exception):
    """The processes could not be started or one of them died; the message says which, why and what to do."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        # Exit status for the command that started the processes: 2 if a process refused its command line.
        self.exit_status = exit_status
