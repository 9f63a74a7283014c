"""The GPU bench of the executor, over the emulated device: it drives the backend as the manager does."""

from __future__ import annotations

from pathlib import Path

import bench_gpu
import pytest
import torch
from bench_gpu import InProcess, in_process, llama_3_8b, prompts_for, rows_of, step_seconds, write_model
from cuda_host import host_backend, save_small_model
from transformers import LlamaConfig, LlamaForCausalLM


def test_it_generates_what_transformers_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "PROMPT_TOKENS", 5)
    monkeypatch.setattr(bench_gpu, "TOKEN_BUDGET", 10)
    model = save_small_model("llama", tmp_path)
    backend = host_backend(tmp_path)
    backend.allocate(bench_gpu.BLOCK_SIZE, 8, 0)
    prompts = prompts_for(3, 256, seed=0)
    driven = InProcess(backend, prompts, 4)
    assert driven.run() > 0
    for state, prompt in zip(driven.states, prompts, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert state.token_ids[: state.num_prompt_tokens] == prompt
        assert driven.outputs[state.seq_id] == expected[0, 5:].tolist()


def test_a_step_is_what_a_longer_run_takes_more() -> None:
    # 5 s of start and prefill, 10 ms a step.
    assert step_seconds(lambda new, seed: 5 + 0.01 * new, 3) == pytest.approx(0.01)


def test_every_batch_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT_TOKENS": 3, "TOKEN_BUDGET": 6, "SHORT": 1, "LONG": 3}.items():
        monkeypatch.setattr(bench_gpu, name, value)
    save_small_model("llama", tmp_path)
    assert set(in_process(host_backend(tmp_path), [1, 2], 256, rounds=1)) == {1, 2}


def test_rows_say_what_the_split_costs() -> None:
    small, large = rows_of({1: 0.010, 32: 0.020}, {1: 0.015}, {1: 0.0101, 32: 0.021}, {})
    assert small["split_costs"] == pytest.approx(0.01)
    assert small["split_floor_reached"]
    assert not large["split_floor_reached"]
    assert large["tok_s_graphs"] == 1600
    assert large["tok_s_without_graphs"] is None


def test_the_written_model_loads(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    write_model(tmp_path, config, torch.device("cpu"))
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert float(model.model.layers[1].mlp.up_proj.weight.detach().float().std()) == pytest.approx(0.02, rel=0.1)
    assert type(host_backend(tmp_path, dtype="bfloat16")).__name__ == "CudaBackend"


def test_the_shape_is_llama_3_8b() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LlamaForCausalLM(llama_3_8b()).parameters())
    assert parameters == 8_030_261_248
