"""Models split over ranks of the cuda backend answer as transformers' `generate` does in one process: kernels are
emulated, and gloo is in the place of NCCL, so that nothing here says how GPUs do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.executor import cuda_host
from support.executor.beam_driver import beam_reference
from support.executor.cpu_driver import MODELS, WINDOW, prompts_of, reference
from support.executor.cuda_host import host_backend, save_small_model
from support.executor.families import FAMILIES, family_config
from support.executor.split_model import BEAMS, END, SplitRun, answers_of, sampled

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 4
HITS = [8, 16]
# Four query heads, so that four ranks have one each.
SPLIT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 4, "sliding_window": WINDOW},
    "gemma2": {"num_key_value_heads": 1, "sliding_window": WINDOW},
    # Norms of all heads together: each rank has them all in between, and transformers' model computes steps.
    "olmo2": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2},
}
LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def all_families(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {name: lambda name=name: family_config(name) for name in FAMILIES if name not in MODELS}
    monkeypatch.setattr(cuda_host, "MODELS", {**MODELS, **more})


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["llama"], 2),
        pytest.param(["qwen3", "mistral", "gemma2", "olmo2", "qwen3_moe"], 2, marks=LONG),
        pytest.param(["llama"], 4, marks=LONG),
    ],
)
def test_answers_are_those_of_generate(names: list[str], ranks: int, tmp_path: Path) -> None:
    base, *tails = prompts_of([17, 3, 5], seed=5)
    prompts = [base, *(base[:hit] + tail for hit, tail in zip(HITS, tails, strict=True))]
    made, wanted, beams = [], [], []
    for name in names:
        fields = {"num_attention_heads": 4, **SPLIT[name]}
        model = save_small_model(name, tmp_path / name, seed=3, **fields)
        wanted.append([reference(model, prompt, NEW) for prompt in prompts])
        beams.append(beam_reference(model, base, BEAMS, BEAMS, NEW, length_penalty=1.0, end_ids=[END]))
        made.append(SplitRun(str(tmp_path / name), prompts, HITS, NEW, device="cuda"))
    for name, run, answers, results in zip(names, answers_of(made, ranks), wanted, beams, strict=True):
        assert run["cold"] == answers, name
        assert run["preempted"] == answers, name
        assert run["hits"] == answers, name
        assert run["beams"] == results, name
        heads = SPLIT[name]["num_key_value_heads"]
        assert run["kv_heads"] == (heads if name == "olmo2" else max(1, heads // ranks)), name
        assert run["fused"] is (name != "olmo2"), name
        assert run["replayed"] > 0, name
        # Drawn as one process does, with the same penalties.
        assert run["sampled"] == sampled(host_backend(tmp_path / name, dtype="float32"), prompts, NEW), name
