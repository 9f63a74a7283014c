"""Greedy output of the CPU backend is that of transformers' `generate`, for one small model of every family served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executor.cpu_driver import WINDOW, Driver, prompts_of, reference, save_config
from support.executor.families import FAMILIES, family_config

from pagekv.executor.cpu import choose_forward
from pagekv.executor.cpu.backend import CpuBackend

NEW = 8
BASE = 40
# Tokens of the first prompt that another one begins with, own tokens, and tokens of those that are found in its blocks.
HITS = ((40, 1, 40), (24, 9, 24))
# Families with parts that no other one of the quick tests has, or has in this order.
QUICK = (
    "cohere2",  # attention and MLP side by side, no rotary embedding in layers without a window
    "gemma3_text",  # another rotary embedding in layers with a window
    "glm4",  # norms behind attention and MLP, half of a head rotated
    "gpt_neox",  # queries, keys and values in one product, by head
    "granitemoe",  # multipliers, experts
    "modernbert-decoder",  # a configuration that takes no None for a token
    "olmo3",  # norms over all heads together
    "opt",  # learned positions, embeddings narrower than the layers
    "persimmon",
    "phi",
    "phi3",
    "qwen2_moe",  # an expert that all tokens share
    "smollm3",
    "starcoder2",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES]
)
def test_answers_are_those_of_generate(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold in one batch, in chunks with a preemption, and with prefix hits; and by the compiled loops, which a backend
    gives up for transformers' model alone where both differ.
    """
    judged: list[bool] = []
    agree = choose_forward._agree

    def noted(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
        judged.append(agree(found, expected, tolerance))
        return judged[-1]

    monkeypatch.setattr(choose_forward, "_agree", noted)
    model = save_config(family_config(name), tmp_path)
    base, tail, short = prompts_of([BASE, 9, 2], seed=5)
    prompts = [base, short, *(base[:kept] + tail[:own] for kept, own, _ in HITS)]
    answers = [reference(model, prompt, NEW) for prompt in prompts]
    assert len({token for answer in answers for token in answer}) > 8, "answers are too much alike"
    backend = CpuBackend(tmp_path, name, threads=1)
    assert judged == [True]

    driver = Driver(backend, block_size=4)
    assert driver.generate([driver.sequence(prompt) for prompt in prompts], NEW) == answers

    driver = Driver(backend, block_size=8, host_blocks=16)
    states = [driver.sequence(prompt) for prompt in prompts]
    driver.generate(states, NEW // 2, chunk=WINDOW + 2)
    driver.preempt(states[0])
    driver.preempt(states[2])
    driver.swap_out_and_in(states[3])
    assert driver.generate(states, NEW, chunk=11) == answers

    driver = Driver(backend, block_size=8)
    owner, *others = (driver.sequence(prompt) for prompt in (base, *prompts[2:]))
    driver.step({owner.seq_id: BASE}, [owner])
    for state, (_, _, hit) in zip(others, HITS, strict=True):
        driver.share(owner, state, hit)
    assert driver.generate([owner, *others], NEW) == [answers[0], *answers[2:]]
