"""A mutation's trial: the tests of its module, then all others of the core, in a copy of the tree.

The tests of the copy are the whole of what is judged, so hypothesis draws the same examples for each mutation, and a
failure is not made smaller.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.stateful  # noqa: F401 (imported before the forks)
import numpy.random  # noqa: F401 (imported before the forks)
import pytest
from mutants.mutations import Mutation

SOURCE = "kvmanager/pagekv/kvmanager"
TESTS = "tests/unit/kvmanager"
# The packages that decide about memory and order; of the texts only what ends a request.
PACKAGES = ("kvcache", "kvcache/events", "scheduling", "request")
MODULES = ("text/stop_strings.py",)
# Judges the scheduler and the pool together, in random histories.
WHOLE = "tests/model/test_scheduler_machine.py"
COPIED = ("proto", "kvmanager", "executor", "kernels", "client", "tests", "pyproject.toml")

# A trial that goes on and on is ended by what it took of a processor or of memory, so that a busy machine kills no
# mutant; a test that waits, by the clock. Without a mutation the tests of a module take at most 12 seconds of a
# processor, all together 70, the longest of them 3; and 0.3 GiB.
CPU_S = (60, 500)  # for the tests of a module, for all others
SILENT_S = 120
ADDRESS_BYTES = 4 << 30


def core(root: Path) -> list[str]:
    """Paths of the modules that are mutated, below the root of the tree."""
    paths = [path for package in PACKAGES for path in sorted((root / SOURCE / package).glob("*.py"))]
    return [str(path.relative_to(root)) for path in paths if path.stem != "__init__"] + [
        f"{SOURCE}/{module}" for module in MODULES
    ]


def tests_of(root: Path, path: str) -> tuple[list[str], list[str]]:
    """The tests of the module `path` by their names, and all others of the core, those of its package first."""
    module = Path(path).relative_to(SOURCE)
    packages = dict.fromkeys((str(module.parent), *PACKAGES))
    files = [file for package in packages for file in sorted((root / TESTS / package).glob("test_*.py"))]
    names = [str(file.relative_to(root)) for file in files]
    own = [name for name, file in zip(names, files, strict=True) if _belongs(file, module)]
    return own, [name for name in [*names, WHOLE] if name not in own]


def _belongs(test: Path, module: Path) -> bool:
    aspect = test.stem.removeprefix(f"test_{module.stem}")
    return test.parent.as_posix().endswith(f"{TESTS}/{module.parent}") and aspect[:1] in ("", "_")


class Tree:
    """A copy of the source tree, in which the tests run, with one mutation at a time or with none."""

    def __init__(self, root: Path, at: Path) -> None:
        """Raises OSError when the tree cannot be copied."""
        self.root = at
        self._output = at.with_suffix(".txt")
        self._undo: Callable[[], None] | None = None
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir(parents=True)
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, at / name)
            else:
                shutil.copy2(root / name, at / name)

    def start(self, mutation: Mutation | None, tests: Sequence[str], cpu_s: int) -> int:
        """Begins the tests in a process of their own, and returns its id; one at a time.

        A fork of this process, which has imported pytest and numpy, so that they are not imported for every mutation.
        """
        if mutation is not None:
            path = self.root / mutation.path
            original, times = path.read_bytes(), path.stat()
            path.write_text(mutation.source)

            def undo() -> None:
                path.write_bytes(original)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

            self._undo = undo
        if (pid := os.fork()) == 0:
            try:
                os._exit(self._run(tests, cpu_s, compiles=mutation is None))
            finally:
                os._exit(70)
        return pid

    def end(self, code: int) -> str | None:
        """Takes the mutation back once the process has ended, and says what killed it: the test that failed, or the
        signal that ended its process; None when all tests passed.

        Raises RuntimeError when there is no answer because pytest itself failed.
        """
        if self._undo is not None:
            self._undo()
            self._undo = None
        output = self._output.read_text()
        failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if code == 0:
            return None
        if code < 0:
            return signal.Signals(-code).name
        if code not in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) or not failed:
            raise RuntimeError(f"pytest ended with {code} and no failure:\n{output}")
        return failed[0]

    def _run(self, tests: Sequence[str], cpu_s: int, *, compiles: bool) -> int:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        with open(os.devnull) as nothing, self._output.open("w") as output:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(self.root)
        # A file that is compiled with one mutation would be taken for the same file with the next one.
        sys.dont_write_bytecode = not compiles
        # More random histories than in other runs, and the nightly ones: no other run will look at this mutation.
        os.environ.setdefault("PAGEKV_TEST_EXAMPLES", "150")
        options = [
            "-m",
            "not kernels and not long",
            "-x",
            "-q",
            "--no-header",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        options += ["--hypothesis-seed=0", "--hypothesis-profile=first-failure", f"--timeout={SILENT_S}"]
        return int(pytest.main([*options, *tests]))
