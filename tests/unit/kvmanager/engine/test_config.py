"""The settings of the engine loop."""

from __future__ import annotations

import dataclasses

import pytest
from support.engine.engine_harness import config


def test_settings_are_fixed_once_the_flags_are_read() -> None:
    settings = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.block_size = 8  # type: ignore[misc]
    assert not settings.block_ages
