"""A model that the kernels serve, on one thread of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.executor.cuda_host import save_small_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small work: threads would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_small_model("llama", directory)
    return directory
