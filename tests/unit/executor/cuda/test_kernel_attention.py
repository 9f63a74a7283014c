"""The kernels that serve a model, and the rows of padding in a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cpu_driver import Driver, prompts_of, save_model
from support.executor.cuda_host import host_backend, save_small_model

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import AttentionPlan


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_small_model("llama", directory)
    return directory


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {}, r"LlamaForCausalLM cannot be served by the cuda backend: head_size: .* got 12"),
        ("gpt2", {}, r"GPT2LMHeadModel .* head_size"),
    ],
)
def test_head_sizes_without_a_kernel_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    save_model(name, tmp_path)
    with pytest.raises(ValueError, match=reason):
        host_backend(tmp_path, **options)


@pytest.mark.parametrize("fused", [True, False])
def test_rows_that_fill_a_graph_up_attend_to_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Three sequences in a graph of four rows, replayed: nothing behind attention reads unwritten memory."""
    backend = host_backend(llama, max_sequences=4, dtype="float32", fused=fused)
    seen, attend = list[torch.Tensor](), PagedAttention.attend

    def watch(self: PagedAttention, layer: int, query: Any, out: Any, plan: AttentionPlan) -> None:
        out.fill_(torch.nan)
        attend(self, layer, query, out, plan)
        if len(query) == 4:
            seen.append(out)

    monkeypatch.setattr(PagedAttention, "attend", watch)
    driver = Driver(backend, 16)
    driver.generate([driver.sequence(prompt) for prompt in prompts_of([3, 4, 250])], 4)
    assert backend.runner.graphs.num_replayed > 0
    assert len(seen) >= 6
    assert all(bool(out[:3].any()) and not out[3].any() for out in seen)
