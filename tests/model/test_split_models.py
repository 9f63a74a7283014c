"""Models split over ranks answer as transformers' `generate` does in one process, and share out their KV heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.executor.beam_driver import beam_reference
from support.executor.cpu_driver import WINDOW, prompts_of, reference, save_config
from support.executor.families import family_config
from support.executor.split_model import BEAMS, END, SplitRun, answers_of

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 8
HITS = [40, 24, 16]
# Four query heads, so that four ranks have one each.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 80},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 16},
    "mistral": {"num_key_value_heads": 4, "intermediate_size": 80, "sliding_window": WINDOW},
    "gemma2": {
        "num_key_value_heads": 1,
        "intermediate_size": 80,
        "head_dim": 12,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
                  "intermediate_size": 80, "num_key_value_heads": 2},
}  # fmt: skip  # laid out as a table
# Two query heads on each of three ranks, and both KV heads, of which one rank has each twice. The second family has
# biases in layers that ranks sum.
_THIRDS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 96}
IN_THREE: dict[str, dict[str, Any]] = {"llama": _THIRDS, "starcoder2": {**_THIRDS, "sliding_window": WINDOW}}


def runs(
    folder: Path, families: dict[str, dict[str, Any]], **options: Any
) -> tuple[list[SplitRun], list[list[list[int]]], list[Any]]:
    """A run for each family, and the answers and beams that `generate` gives."""
    base, *tails = prompts_of([41, 9, 11, 5], seed=5)
    prompts = [base, *(base[:hit] + tail for hit, tail in zip(HITS, tails, strict=True))]
    made, wanted, beams = [], [], []
    for name, fields in families.items():
        directory = folder / name
        model = save_config(family_config(name, **fields), directory, seed=3)
        if options.get("dtype") == "float64":
            # In grouped products, as it has them else, torch has no float64.
            model = model.double()
            model.set_experts_implementation("eager")
        wanted.append([reference(model, prompt, NEW) for prompt in prompts])
        beams.append(beam_reference(model, base, BEAMS, BEAMS, NEW, length_penalty=1.0, end_ids=[END]))
        made.append(SplitRun(str(directory), prompts, HITS, NEW, **options))
    return made, wanted, beams


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.nightly),  # two ranks, and three below, show the same
        pytest.param(2, {"fused": False}, marks=pytest.mark.long),
        pytest.param(2, {"dtype": "float64"}, marks=pytest.mark.long),
        pytest.param(4, {"dtype": "float64"}, marks=pytest.mark.nightly),  # two ranks show the same
    ],
)
def test_answers_are_those_of_generate(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    names = list(FAMILIES)
    made, wanted, beams = runs(tmp_path, FAMILIES, **options)
    found = answers_of(made, ranks)
    for name, run, answers, results in zip(names, found, wanted, beams, strict=True):
        assert run["cold"] == answers, name
        assert run["preempted"] == answers, name
        assert run["hits"] == answers, name
        assert run["beams"] == results, name
    heads = {name: run["kv_heads"] for name, run in zip(names, found, strict=True)}
    own = {name: max(1, FAMILIES[name]["num_key_value_heads"] // ranks) for name in names}
    assert heads == own
    fused = {name: run["fused"] for name, run in zip(names, found, strict=True)}
    compiled = not options.get("dtype") and options.get("fused", True)
    assert fused == {name: compiled and name != "qwen3_moe" for name in names}


@pytest.mark.long  # tests/unit/executor/model/test_tensor_parallel.py shares out heads without a model
def test_ranks_that_do_not_divide_the_kv_heads_answer_as_generate_does(tmp_path: Path) -> None:
    made, wanted, beams = runs(tmp_path, IN_THREE)
    for name, run, answers, results in zip(IN_THREE, answers_of(made, 3), wanted, beams, strict=True):
        assert [run["cold"], run["preempted"], run["hits"]] == [answers] * 3, name
        assert run["beams"] == results, name
        assert run["kv_heads"] == 2, name
