"""Measurements of the CPU backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clients.stack import environment
from support.executor.cpu_driver import SMALL, VOCAB, save_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from pagekv.executor.cpu import profile
from pagekv.executor.cpu.forward import ModuleForward
from pagekv.executor.cpu.profile import PROFILED_TOKENS, measure_swap_rates, profile_step
from pagekv.executor.cpu.runner import run_step
from pagekv.executor.model.loading import BlockGeometry, load_model


def test_swapping_is_measured_both_ways() -> None:
    out_rate, in_rate = measure_swap_rates(BlockGeometry(2, 2, 8, torch.float32), 16)
    assert out_rate > 0
    assert in_rate > 0


def test_the_logits_of_all_who_may_sample_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16)
    forward = ModuleForward(loaded.model)
    # The process grows by more or less than such a small step takes.
    monkeypatch.setattr(profile, "kib_field", lambda path, name: 0)
    for budget, most, rows in ((40, 7, 7), (5, 7, 5)):
        found = profile_step(forward, loaded, 4, budget, most)
        assert found.activation_bytes == rows * VOCAB * 2
        assert found.prefill_tokens_per_s > 0


def test_tokens_beyond_those_that_are_run_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    forward, ran = ModuleForward(loaded.model), [0]

    def counted(*given: Any) -> object:
        ran.append(given[2].input_ids.numel())
        return run_step(*given)

    monkeypatch.setattr(profile, "run_step", counted)
    monkeypatch.setattr(profile, "kib_field", lambda path, name: 7000 if name == "VmHWM" else 1000)
    for budget, most, bytes_ in ((40, 40, 6000), (PROFILED_TOKENS, PROFILED_TOKENS, 6000), (1000, 256, 23438)):
        assert profile_step(forward, loaded, 4, budget, 0).activation_bytes == bytes_
        assert ran[-1] == max(ran) == most


# For each folder of a model in a process of its own, whose memory is the steps', forked from one that has imported
# torch and transformers: profiles, with whole steps of as many tokens between them, and how much the largest took.
STEPS = """
import os, sys
from pathlib import Path
from pagekv.executor.model.torch_import import import_torch
import_torch()
from pagekv.executor.model.transformers_import import import_transformers
import_transformers()
import torch
from pagekv.common.freed_memory import keep_freed_memory
from pagekv.executor.cpu.choose_forward import load_forward
from pagekv.executor.cpu.profile import profile_step, run_prompts

for folder in map(Path, sys.argv[1:]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, folder
        continue
    torch.set_num_threads(2)
    keep_freed_memory(2**30)
    loaded, forward = load_forward(folder, torch.float32, fused=folder.name == "fused")
    counted, took = [], []
    for _ in range(3):
        counted.append(profile_step(forward, loaded, 16, 2048, 0).activation_bytes)
        took.append(run_prompts(forward, loaded, 16, 2048)[0])
    print(folder.name, min(counted), max(counted), max(took), flush=True)
    os._exit(0)
"""
_SIZES = {**SMALL, "vocab_size": 512, "max_position_embeddings": 2048, "initializer_range": 0.05}
_LLAMA = LlamaConfig(
    **{**_SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_key_value_heads": 2}
)
_GPT2 = GPT2Config(n_embd=512, n_layer=2, n_head=4, n_positions=2048, vocab_size=512, bos_token_id=None)


def test_what_is_counted_is_what_a_whole_step_takes(tmp_path: Path) -> None:
    """Also after steps that left their memory to the C library. Where gaps of the heap and large pages fall is chance:
    all that is bounded is how far it goes.
    """
    ways = {"fused": _LLAMA, "alone": _GPT2}
    for way, config in ways.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / way)
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *(str(tmp_path / way) for way in ways)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert [way for way, *_ in found] == [*ways]
    for way, *sizes in found:
        least, most, took = map(int, sizes)
        # As much as the largest tensor of a step: one layer's inner values, in float32.
        assert took > 2048 * 2048 * 4, way
        assert least > took / 2, way
        assert most < 4 * took, way
