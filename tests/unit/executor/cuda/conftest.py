"""A model that the kernels serve, on one thread of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.executor.cuda_host import save_small_model


@pytest.fixture(scope="module", autouse=True)
def on_one_thread(one_thread: None) -> None:
    """All tests of this folder."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_small_model("llama", directory)
    return directory
