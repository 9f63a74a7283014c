"""Launchers of a GPU and of the emulation are called alike."""

from __future__ import annotations

import inspect

import pytest
from support.kernels.host_build import HostLauncher

from pagekv.kernels.cupy_launcher import CupyLauncher
from pagekv.kernels.launcher import Launcher


@pytest.mark.parametrize("implementation", [CupyLauncher, HostLauncher])
def test_launch_takes_what_the_interface_says(implementation: type) -> None:
    assert inspect.signature(implementation.launch) == inspect.signature(Launcher.launch)  # type: ignore[attr-defined]  # of two classes
