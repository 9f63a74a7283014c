"""A model that the kernels serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.executor.cuda_host import save_small_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_small_model("llama", directory)
    return directory
