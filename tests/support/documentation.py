"""The repository's documents as tests read them: pages, links, commands, and the files and modules that pages name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "DESIGN.md", "SECURITY.md")), *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line of a page, as the shell would hand it on. `shown` is how the page writes it."""

    page: Path
    words: tuple[str, ...]
    shown: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.shown}"


def fenced(page: Path, language: str) -> list[str]:
    """The page's fenced blocks of a language."""
    return [text for found, text in _FENCE.findall(page.read_text()) if found == language]


def inline_code(page: Path) -> list[str]:
    """Every span of code in the page's prose and tables, on one line each."""
    return [" ".join(span.split()) for span in _CODE.findall(_FENCE.sub("", page.read_text()))]


def links(page: Path) -> list[str]:
    """Targets of links and pictures, as written."""
    return [markdown or html for markdown, html in _LINK.findall(_FENCE.sub("", page.read_text()))]


def anchors(page: Path) -> set[str]:
    """Fragments by which the page's headings are reached, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shell_commands(page: Path) -> Iterator[Command]:
    """The lines of the page's `sh` blocks, variables that the block sets filled in."""
    for block in fenced(page, "sh"):
        variables: dict[str, str] = {}
        for line in block.splitlines():
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            words = shlex.split(line, comments=True)
            if len(words) == 1 and (assignment := _ASSIGNMENT.fullmatch(words[0])):
                variables[assignment[1]] = assignment[2]
            elif words:
                yield Command(page, tuple(words), line)


def inline_commands(page: Path, programs: tuple[str, ...]) -> Iterator[Command]:
    """Spans of code that call one of the programs with something behind it."""
    for span in inline_code(page):
        if span.startswith(tuple(f"{program} " for program in programs)):
            yield Command(page, tuple(shlex.split(span)), span)
