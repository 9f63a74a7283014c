"""The draw of `make mutants`. Its trials take too long for every run; docs/mutants.md has what they said."""

from __future__ import annotations

from pathlib import Path

from mutants.mutations import Mutation, draw

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
def first(values: list[int | None], at: int = 0) -> int:
    """The first value, and `not` a word of this changes."""
    if at < len(values):
        return max(at, 7)
    self.place = "text"
    self.clear(at)
    return None
'''


def drawn(root: Path, source: str, seed: int, count: int = 100) -> list[Mutation]:
    (root / "a.py").write_text(source)
    return draw(root, ["a.py"], count, seed)


def changes(mutations: list[Mutation]) -> set[str]:
    return {line[1:].strip() for mutation in mutations for line in mutation.diff.splitlines()[3:] if line[0] == "+"}


def test_every_kind_of_change_is_drawn_and_no_other(tmp_path: Path) -> None:
    found = {change for seed in range(20) for change in changes(drawn(tmp_path, SOURCE, seed))}
    assert found == {
        "def first(values: list[int | None], at: int = 1) -> int:",
        "if at <= len(values):",
        "if not (at < len(values)):",
        "return max(7)",
        "return max(at, )",
        "return max(at, 8)",
        "pass",
    }


def test_a_draw_takes_one_change_a_line_and_stays_after_edits_of_others(tmp_path: Path) -> None:
    before = drawn(tmp_path, SOURCE, 1)
    assert len(before) == 5
    after = drawn(tmp_path, "x = 1\n" + SOURCE.replace("max(at, 7)", "max(at, 9)"), 1)
    names = {mutation.name for mutation in after}
    assert sum(mutation.name in names for mutation in before) == 4
    assert drawn(tmp_path, SOURCE, 1, 2) == before[:2]
