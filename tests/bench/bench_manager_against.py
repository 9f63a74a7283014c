"""`bench_manager` of this tree against that of another, sample by sample in turns:
`make bench-manager-against ARGS=DIR`, where DIR is made by `git worktree add DIR REV`.

Machines change their speed by half within seconds, so two runs one after the other tell nothing about a few percent.
Here two processes on one core, one a tree, hold a baton for one sample each: whatever slows one sample slows the next
one too. Printed are the median of either, and the median ratio of this tree to the other (above 1: this one is slower).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "kvmanager", "executor", "kernels", "client", "tests", "tests/bench")
# Runs in each process, with the tree's own workloads: every sample lies between two looks at the clock.
WORKER = """
import json, os, sys, time
from contextlib import suppress
import bench_manager, manager_workloads as work
take, give, only, repeats = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])

class Clock:
    looks = 0
    @classmethod
    def perf_counter(cls):
        now = time.perf_counter()
        cls.looks += 1
        if cls.looks % 2:
            return time.perf_counter()
        with suppress(BrokenPipeError):
            os.write(give, b"b")
            os.read(take, 1)
        return now

os.read(take, 1)
rows = {}
work.time = Clock
for bench in bench_manager.BENCHES:
    if only in bench.work and bench.unit != "bytes":
        samples = bench.samples(repeats)
        rows[bench.work] = [1 / sample for sample in samples] if "/s" in bench.unit else samples
print(json.dumps(rows))
"""


def _worker(tree: Path, take: int, give: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The process of one tree, which takes the baton from one pipe and gives it to another."""
    paths = os.pathsep.join(str(tree.resolve() / package) for package in PACKAGES)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(take), str(give), args.only, str(args.repeats)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        pass_fds=(take, give),
        cwd=tree / "tests" / "bench",
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tree", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--repeats", type=int, default=41, help="samples per row, at least 9 (default: 41)")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    args = parser.parse_args()
    if not (args.tree / "tests" / "bench").is_dir():
        parser.error(f"{args.tree} is no checkout: make one with `git worktree add DIR REV`")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    (to_that, from_this), (to_this, from_that) = os.pipe(), os.pipe()
    os.write(from_this, b"b")
    workers = [_worker(args.tree, to_that, from_that, args), _worker(HERE, to_this, from_this, args)]
    for end in (to_that, from_this, to_this, from_that):
        os.close(end)
    old, new = (json.loads(worker.communicate()[0]) for worker in workers)
    print(f"{'work':40} {'that':>12} {'this':>12}  this / that")
    for work, before in old.items():
        if work in new:
            ratio = statistics.median(b / a for a, b in zip(before, new[work], strict=False))
            was, now = statistics.median(before), statistics.median(new[work])
            print(f"{work:40} {was * 1e6:9.4g} us {now * 1e6:9.4g} us  {ratio:.3f}")


if __name__ == "__main__":
    main()
