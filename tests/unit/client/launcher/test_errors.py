"""The error of a launcher is its message and the status that a command ends with."""

from __future__ import annotations

from pagekv.client.launcher.errors import StackError


def test_a_failure_ends_a_command_with_1_where_nothing_else_is_said() -> None:
    assert (str(StackError("why")), StackError("why").exit_status) == ("why", 1)
    assert StackError("why", exit_status=2).exit_status == 2
