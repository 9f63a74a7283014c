"""For all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from host_build import HostLauncher

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("pagekv", deadline=None)
settings.load_profile("pagekv")


@pytest.fixture(scope="session", params=["forward", "reversed"])
def launcher(request: pytest.FixtureRequest) -> HostLauncher:
    """Runs kernels on the CPU; every test runs with both orders of blocks, warps and threads."""
    from host_build import HostLauncher

    return HostLauncher(reversed_order=request.param == "reversed")
