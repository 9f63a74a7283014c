"""How the sampler is chosen."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.executor.cuda_host import HostDevice
from support.kernels.host_build import HostLauncher

from pagekv.executor.cuda.choose_sampler import choose_sampler
from pagekv.executor.cuda.torch_sampler import TorchSampling
from pagekv.kernels.sampling import MAX_VOCAB_SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_logits", [2, 300])
def test_the_kernel_samples_where_it_agrees(num_logits: int, dtype: torch.dtype) -> None:
    assert isinstance(choose_sampler(num_logits, dtype, HostDevice()), partial)


def test_torch_samples_where_the_kernel_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(text: str) -> str:
        return text.replace("choice.top_p != kNone", "false")

    device = HostDevice(launcher=HostLauncher(edit=wrong))
    assert choose_sampler(300, torch.float32, device) is TorchSampling
    assert "the kernel chooses other tokens in a check" in str(vars(caplog.records[-1]))


def test_torch_samples_where_the_vocabulary_is_too_large() -> None:
    assert choose_sampler(MAX_VOCAB_SIZE + 1, torch.float32, HostDevice()) is TorchSampling
