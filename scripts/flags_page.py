"""Writes docs/flags.md, every flag of the two server processes, from their declarations: `make flags`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from pagekv.common.flags import Declaration, declarations, variable_of
from pagekv.executor.config import PROG as EXECUTOR
from pagekv.executor.config import ExecutorConfig
from pagekv.kvmanager.config import PROG as MANAGER
from pagekv.kvmanager.config import ManagerConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
PROCESSES: dict[str, type[Any]] = {MANAGER: ManagerConfig, EXECUTOR: ExecutorConfig}
HEAD = """\
# Flags

Written by `make flags` from the declarations that `--help` is made of; a test fails when this page is stale.

Every flag can be set as an environment variable; a flag on the command line wins. A switch, with default on or off, is
`--name` or `--no-name`, as a variable `on` or `off`. A bad value is refused at start (exit status 2) with the flag, its
bounds and the value. `pagekv up` and `pagekv demo` hand flags on with `--manager-args` and `--executor-args`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command, config in PROCESSES.items():
        parts.append(f"\n## {command}\n")
        for group, flags in groupby(declarations(config), key=lambda each: each.group):
            if group:
                parts.append(f"\n### {group[0].upper()}{group[1:]}\n")
            parts.append("\n| flag | variable | default | meaning |\n| --- | --- | --- | --- |\n")
            parts += [_row(each) for each in flags]
    return "".join(parts)


def _row(each: Declaration) -> str:
    metavar, choices = each.arguments.get("metavar"), each.arguments.get("choices")
    shown = f"`--{each.name}{f' {metavar}' if metavar else ''}`"
    if isinstance(each.default, bool):
        default = "on" if each.default else "off"
    else:
        default = "" if each.default in (None, "") else f"`{each.default}`"
    needs = each.arguments.get("needs")
    meaning = (f"{', '.join(choices)}: " if choices else "") + each.help + (f"; only with --{needs}" if needs else "")
    cells = (shown, f"`{variable_of(each.name)}`", default, meaning.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
