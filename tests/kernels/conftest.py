"""For the tests of the kernels."""

from __future__ import annotations

import pytest
from support.kernels.host_build import HostLauncher


@pytest.fixture(scope="session", params=["forward", "reversed"])
def launcher(request: pytest.FixtureRequest) -> HostLauncher:
    """Runs kernels on the CPU; every test runs with both orders of blocks, warps and threads."""
    return HostLauncher(reversed_order=request.param == "reversed")
