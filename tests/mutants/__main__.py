"""`make mutants`: single mutations of the manager's core, a seeded draw, and which of them no test notices.

Results are kept in build/mutants, a line for each mutation, and the next run goes on from there: what is killed stays
so, survivors are tried again. The checkout itself is never changed. Exit status 0 when every survivor is listed as
equivalent in docs/mutants.md, 1 when another one survives, or when tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from mutants.mutations import Mutation, draw
from mutants.trials import CPU_S, Tree, core, tests_of

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
PAGE = ROOT / "docs" / "mutants.md"


def equivalent(page: str) -> dict[str, str]:
    """Names of the mutations that change no behaviour, with the reasons: the rows of the table in docs/mutants.md."""
    return dict(re.findall(r"^\| `([0-9a-f]{16})` \|.*\| ([^|]+) \|$", page, re.MULTILINE))


class Kills:
    """For each dead mutation the test that killed it, in earlier runs or in this one; appended to a file at once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        self.by: dict[str, str] = dict(json.loads(line) for line in lines)

    def add(self, mutation: Mutation, killer: str) -> None:
        self.by[mutation.name] = killer
        with self._file.open("a") as file:
            file.write(json.dumps([mutation.name, killer]) + "\n")

    def alive(self, drawn: list[Mutation]) -> list[Mutation]:
        return [mutation for mutation in drawn if mutation.name not in self.by]


def passes(tree: Tree) -> bool:
    """Whether the tests pass without a mutation: nothing that they say afterwards would count."""
    own, others = tests_of(ROOT, core(ROOT)[0])
    _, status = os.waitpid(tree.start(None, [*own, *others], sum(CPU_S)), 0)
    failed = tree.end(os.waitstatus_to_exitcode(status))
    if failed:
        print(f"error: {failed} fails without any mutation", file=sys.stderr)
    return failed is None


def run(waiting: list[Mutation], kills: Kills, trees: list[Tree], others: bool) -> None:
    """Tries mutations against the tests of their modules, or against all others: as many at once as there are trees."""
    begin, done = time.monotonic(), 0
    free, busy, left = list(trees), dict[int, tuple[Tree, Mutation]](), iter(waiting)
    while True:
        while free and (mutation := next(left, None)):
            tree = free.pop()
            tests, cpu_s = tests_of(ROOT, mutation.path)[others], CPU_S[others]
            busy[tree.start(mutation, tests, cpu_s)] = tree, mutation
        if not busy:
            return
        pid, status = os.wait()
        tree, mutation = busy.pop(pid)
        free.append(tree)
        if killer := tree.end(os.waitstatus_to_exitcode(status)):
            kills.add(mutation, killer)
        done += 1
        seconds = time.monotonic() - begin
        print(f"{seconds:6.0f} s {done}/{len(waiting)} {mutation.name} {killer or 'lives'}", flush=True)


def report(drawn: list[Mutation], kills: Kills) -> bool:
    """Prints the survivors, those of no listed reason last; True when there is none of the latter."""
    reasons = equivalent(PAGE.read_text())
    survivors = kills.alive(drawn)
    holes = [mutation for mutation in survivors if mutation.name not in reasons]
    for mutation in sorted(survivors, key=lambda mutation: mutation.name not in reasons):
        print(f"\n{mutation.name} survived: {reasons.get(mutation.name, 'NO TEST NOTICES')}\n{mutation.diff}")
    killed, changing = len(drawn) - len(survivors), len(drawn) - len(survivors) + len(holes)
    print(f"\n{len(drawn)} mutations, {len(drawn) - changing} of them equivalent")
    print(f"of the other {changing} the tests notice {killed} ({killed / max(changing, 1):.1%})")
    return not holes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many mutations [300]")
    parser.add_argument("--seed", type=int, default=1, help="which ones [1]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at once [one a processor]")
    args = parser.parse_args()
    if args.count < 1 or args.jobs < 1:
        parser.error("--count and --jobs must be at least 1")
    drawn = draw(ROOT, core(ROOT), args.count, args.seed)
    kills = Kills(BUILD / "kills.jsonl")
    print(f"{len(drawn)} mutations, {len(drawn) - len(kills.alive(drawn))} of them killed by earlier runs", flush=True)
    if kills.alive(drawn):
        trees = [Tree(ROOT, BUILD / f"tree-{job}") for job in range(args.jobs)]
        if not all(passes(tree) for tree in trees):
            return 1
        for others in (False, True):
            print("all other tests of the core:" if others else "the tests of each module:", flush=True)
            run(kills.alive(drawn), kills, trees, others)
    return 0 if report(drawn, kills) else 1


if __name__ == "__main__":
    sys.exit(main())
