"""For all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from pagekv.common.paused_collector import paused_collector

# As in every process of PageKV: gRPC's core, whose threads outlive a test, would write into what the next one captures.
# Read while gRPC is imported, which nothing above does.
os.environ["GRPC_VERBOSITY"] = "NONE"

# Tables are as wide as where there is no terminal, whatever the caller's terminal is.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so would every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("pagekv", deadline=None)
# For `make mutants`: any failure is enough, and what one mutation did is not tried again with the next.
settings.register_profile("first-failure", deadline=None, phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("pagekv")

# The tests of every run: pyproject's addopts.
QUICK = "not kernels and not long and not nightly"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: of the time of an end-to-end test half is spent waiting for servers, steps and timeouts."""
    return (os.cpu_count() or 1) + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, which finds next to nothing while modules are imported and ten thousand tests are
    listed, and would look at all of them again in every full collection of a test.
    """
    with paused_collector(), pytest.MonkeyPatch.context() as patch:
        if "OMP_WAIT_POLICY" not in os.environ:
            # Read when torch is imported: its threads in this process sleep when they wait, because tests are more than
            # cores. Processes that tests start later wait as they do for users.
            patch.setenv("OMP_WAIT_POLICY", "passive")
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first, so that none of these is waited for at the end."""
    first = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes on one thread: for small work, in which threads would mostly wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for each reason why tests were skipped, with what makes them run; and where the rest of the tests is."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"skipped {count} test{'s' if count > 1 else ''}: {reason}", yellow=True)
    if config.option.markexpr == QUICK:
        terminalreporter.line("not run here: emulated CUDA kernels (make kernels), long tests (make test-all), random")
        terminalreporter.line("histories by the ten thousand (make test-nightly)")
