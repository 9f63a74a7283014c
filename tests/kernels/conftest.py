"""For the tests of the kernels: launchers, and the marker `kernels` of all tests but a quick sample."""

from __future__ import annotations

import pytest
from support.kernels.bench_machine import HostMachine
from support.kernels.host_build import HostLauncher

from pagekv.kernels.bench.machine import Arena

# Tests without the marker, for plain `make test`: files that neither emulate nor compile kernels (single tests in them
# that do carry the marker), and one test that writes, decodes, prefills and copies blocks on emulated kernels.
SAMPLE = (
    "test_attention.py",
    "test_attention_launch.py",
    "test_attention_plan.py",
    "test_bench_correctness.py::test_every_check_passes_on_the_emulated_kernels[float16 d64-",
    "test_bench_machine.py",
    "test_bench_main.py",
    "test_bench_report.py",
    "test_bench_stages.py::test_stages_share_less_than_all_the_time",
    "test_bench_workload.py",
    "test_cupy_launcher.py",
    "test_decode_plan.py",
    "test_host_memory.py",
    "test_launch_config.py",
    "test_machine_code.py",
    "test_nvrtc.py",
    "test_params.py",
    "test_planted_faults.py",
    "test_prefill_plan.py",
    "test_prefill_splits.py",
    "test_shared_splits.py",
    "test_sources.py",
    "test_swap.py",
    "test_tensors.py",
    "test_variants.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder that are not in the sample."""
    for item in items:
        folder, _, name = item.nodeid.rpartition("kernels/test_")
        if folder == "tests/" and not f"test_{name}".startswith(SAMPLE):
            item.add_marker("kernels")
            item.add_marker(pytest.mark.timeout(1800))  # emulation is slow on a busy machine


@pytest.fixture(scope="session", params=["forward", "reversed"])
def launcher(request: pytest.FixtureRequest) -> HostLauncher:
    """Runs kernels on the CPU, in both orders of blocks, warps and threads; test_sanitizers has the second nightly."""
    return HostLauncher(reversed_order=request.param == "reversed")


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    """The bench's machine, on emulated kernels."""
    return HostMachine()


@pytest.fixture(scope="module")
def arena(machine: HostMachine) -> Arena:
    """Memory of the bench's cases."""
    return Arena(machine, machine.memory())
