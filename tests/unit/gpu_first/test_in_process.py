"""The GPU bench's driver of the backend, over the emulated device: it drives as the manager does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_first.in_process import (
    GREEDY,
    REHEARSED,
    TOP_P,
    InProcess,
    allocate,
    decode_seconds,
    mixed_seconds,
    prompts_for,
    step_seconds,
)
from gpu_first.llama import llama_3_8b, two_layers, write_model
from support.executor.cuda_host import host_backend, save_small_model
from transformers import LlamaForCausalLM

from pagekv.executor.backend.interface import Sampled, Scheduled, SequenceState


def test_it_generates_what_transformers_generates(tmp_path: Path) -> None:
    model = save_small_model("llama", tmp_path)
    backend = host_backend(tmp_path)
    sizes = replace(REHEARSED, long=4, token_budget=10)
    allocate(backend, sizes)
    prompts = prompts_for(3, sizes.prompt_tokens, 256, seed=0)
    driven = InProcess(backend, prompts, 4, sizes)
    assert driven.run() > 0
    for state, prompt in zip(driven.states, prompts, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert state.token_ids[: state.num_prompt_tokens] == prompt
        assert driven.outputs[state.seq_id] == expected[0, sizes.prompt_tokens :].tolist()


def test_a_step_is_what_a_longer_run_takes_more() -> None:
    # 5 s of start and prefill, 10 ms a step.
    took = step_seconds(lambda new, seed: 5 + 0.01 * new, REHEARSED)
    assert took.columns(3) == pytest.approx(
        {"batch": 3, "step_ms": 10, "step_ms_least": 10, "step_ms_most": 10, "tok_per_s": 300}
    )
    with pytest.raises(ValueError, match="less than their noise"):
        step_seconds(lambda new, seed: 5 - 0.01 * new, REHEARSED).columns(1)


def test_decodes_and_steps_mixed_with_prompts_are_measured(tmp_path: Path) -> None:
    save_small_model("llama", tmp_path)
    backend = host_backend(tmp_path)
    allocate(backend, REHEARSED)
    for sampling in (GREEDY, TOP_P):
        decode_seconds(backend, 2, 256, REHEARSED, sampling)
    assert backend.runner.graphs.num_replayed > 0
    assert mixed_seconds(backend, 2, 256, REHEARSED) > 0


class Ahead:
    """A backend whose steps take a second each on a device of its own; `now` is the host's clock, which only waits."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def launch(self, scheduled: Sequence[Scheduled]) -> Any:
        self.free = end = max(self.now, self.free) + 1

        def collect() -> dict[int, Sampled]:
            self.now = max(self.now, end)
            return {item.state.seq_id: Sampled(1) for item in scheduled if item.samples}

        return SimpleNamespace(collect=collect)

    def finish(self, states: Sequence[SequenceState]) -> None:
        """Nothing is kept of them."""


def test_a_mixed_step_is_measured_without_those_that_were_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of its shape, which sets things up, is launched before the clock starts, and not over by then."""
    backend: Any = Ahead()
    monkeypatch.setattr("gpu_first.in_process.time", SimpleNamespace(perf_counter=lambda: backend.now))
    assert mixed_seconds(backend, 2, 256, replace(REHEARSED, long=14, mixed_steps=4)) == 1


def test_the_written_model_loads(tmp_path: Path) -> None:
    write_model(tmp_path, two_layers(), torch.device("cpu"), spread=0.3)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert float(model.model.layers[1].mlp.up_proj.weight.detach().float().std()) == pytest.approx(0.3, rel=0.1)
    assert type(host_backend(tmp_path, dtype="bfloat16")).__name__ == "CudaBackend"


def test_the_shape_is_llama_3_8b() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(llama_3_8b()).parameters())
    assert parameters == 8_030_261_248
