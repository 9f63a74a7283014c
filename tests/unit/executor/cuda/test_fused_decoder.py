"""Fused layers: every family's tokens are those of transformers' `generate`, in at most 12 launches a layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import support.executor.cuda_host as cuda_host
import torch
from support.executor.cpu_driver import MODELS, Driver, prompts_of, reference
from support.executor.cuda_host import HostDevice, host_backend, save_small_model
from support.executor.families import FAMILIES, family_config
from support.executor.launch_count import CountingLauncher, CountingOperators

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cuda.backend import CudaBackend
from pagekv.executor.cuda.fused_decoder import FusedLayers, _table
from pagekv.executor.model.loading import load_model

MOST_LAUNCHES = 12
NEW = 4
# Norms before, behind, or both; of heads, alone and together; biases, multipliers, caps, windows, a layer without RoPE.
LONG = ("qwen2", "mistral", "gemma", "gemma2", "gemma3_text", "granite", "olmo3", "phi3", "seed_oss", "smollm3")
NAMES = ["llama", "qwen3", "olmo2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


@pytest.fixture(autouse=True)
def all_families(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {name: lambda name=name: family_config(name) for name in FAMILIES if name not in MODELS}
    monkeypatch.setattr(cuda_host, "MODELS", {**MODELS, **more})


@pytest.mark.parametrize("name", NAMES)
def test_every_familys_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, then decodes alone in graphs."""
    # Another seed where the answers of one are constant.
    model = save_small_model(name, tmp_path, seed=4 if name == "phi3" else 1)
    backend = host_backend(tmp_path)
    assert isinstance(backend.forward, FusedLayers)
    prompts = prompts_of([1, 23, 5], seed=3)
    driver = Driver(backend, 4)
    states = [driver.sequence(prompt) for prompt in prompts]
    assert driver.generate(states, NEW, chunk=6) == [reference(model, prompt, NEW) for prompt in prompts]
    assert backend.runner.graphs.num_replayed > 0


EXPERTS = ["qwen2_moe", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "qwen3_moe", "olmoe"))]


@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_of_experts_are_fused_around_them(name: str, tmp_path: Path) -> None:
    """Tokens are those of transformers; a layer takes the launches of a dense one but the gated activation."""
    # OLMoE's heads share the hidden size, as its norms of them do.
    fields = {"hidden_size": 256} if name == "olmoe" else {}
    model = save_small_model(name, tmp_path, seed=4 if name == "qwen3_moe" else 1, **fields)
    launcher = CountingLauncher(HostDevice().launcher)
    backend = host_backend(tmp_path, HostDevice(launcher=launcher), graphs=False)
    assert isinstance(backend.forward, FusedLayers)
    prompts = prompts_of([1, 13, 5], seed=3)
    driver = Driver(backend, 4)
    states = [driver.sequence(prompt) for prompt in prompts]
    assert driver.generate(states, NEW, chunk=6) == [reference(model, prompt, NEW) for prompt in prompts]
    launcher.counts.clear()
    driver.generate([driver.sequence([1])], 2)
    kernels = launcher.counts
    steps = 2
    assert kernels["pagekv_gated"] == 0
    # Norms of queries and keys are part of the cache write.
    assert kernels["pagekv_cache_write_together" if name == "olmoe" else "pagekv_cache_write"] == 2 * steps
    assert kernels["pagekv_add_norm"] == steps * (2 * 2 + 2)


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_experts_are_in_graphs_unless_the_host_has_to_count_their_tokens(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' grouped products leave all counts on the device; its loop over experts asks for those that have
    tokens. Then no graph is recorded, which is told, and tokens are the same.
    """

    def load(*args: Any) -> Any:
        loaded = load_model(*args)
        loaded.model.set_experts_implementation(experts)
        return loaded

    monkeypatch.setattr("pagekv.executor.cuda.backend.load_model", load)
    model = save_small_model("qwen2_moe", tmp_path)
    backend = host_backend(tmp_path, HostDevice(tries_capture=True), max_sequences=1)
    driver, (prompt,) = Driver(backend, 16, num_blocks=8), prompts_of([5], seed=3)
    assert driver.generate([driver.sequence(prompt)], NEW) == [reference(model, prompt, NEW)]
    graphs = backend.runner.graphs
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    if experts == "grouped_mm":
        assert (graphs.num_failed, errors) == (0, [])
        assert graphs.num_replayed == NEW - 1
    else:
        assert (graphs.num_captured, graphs.num_replayed) == (0, 0)
        assert graphs.num_failed > 0
        assert errors == ["this model cannot be recorded as CUDA graphs: all steps run without, slower"]


def launches(directory: Path, name: str, layers: int, *, fused: bool = True) -> tuple[Counter[str], Counter[str]]:
    """Of a step of decodes, and of a step of a decode and a chunk of a prompt."""
    fields: dict[str, Any] = {"num_hidden_layers": layers}
    if kinds := getattr((MODELS[name]() if name in MODELS else family_config(name)), "layer_types", None):
        fields["layer_types"] = [kinds[0]] * layers
    save_small_model(name, directory, **fields)
    launcher = CountingLauncher(HostDevice().launcher)
    backend = host_backend(directory, HostDevice(launcher=launcher), graphs=False, fused=fused)
    backend.allocate(16, 8, 0)
    first = SequenceState(1, [1, 2, 3, 4, 5, 6], 3, [0], 0, Sampling())
    second = SequenceState(2, list(range(1, 20)), 19, [1, 2], 0, Sampling())

    def step(*scheduled: Scheduled) -> Counter[str]:
        launcher.counts.clear()
        with CountingOperators() as operators:
            backend.launch(list(scheduled))
        return Counter({**launcher.counts, **operators.counts})

    step(Scheduled(first, 0, 3))
    return step(Scheduled(first, 3, 1)), step(Scheduled(first, 4, 1), Scheduled(second, 0, 9))


def of_a_layer(directory: Path, name: str, **options: Any) -> tuple[int, int]:
    two, three = (launches(directory / str(layers), name, layers, **options) for layers in (2, 3))
    return two_more(two[0], three[0]), two_more(two[1], three[1])


def two_more(fewer: Counter[str], more: Counter[str]) -> int:
    return more.total() - fewer.total()


# SmolLM3 names its layers without RoPE one by one, for a fixed number of layers.
COUNTED = ["llama", "qwen3", "olmo2", *(name for name in LONG if name != "smollm3")]


@pytest.mark.parametrize("name", [*COUNTED[:3], *(pytest.param(name, marks=pytest.mark.long) for name in COUNTED[3:])])
def test_launches_of_a_layer(tmp_path: Path, name: str) -> None:
    assert of_a_layer(tmp_path, name) == (9, 10)


def fullest_step(directory: Path, name: str, layer_types: list[str]) -> Counter[str]:
    """Launches of a step of two decodes above 8,192 keys that share all but the last blocks, a short prompt and one
    behind more than 8,192 keys."""
    fields: dict[str, Any] = {"num_hidden_layers": len(layer_types), "max_position_embeddings": 16_384}
    # A window of all layers would leave nothing to share, split or merge.
    fields |= {"layer_types": layer_types} if layer_types[0] else {"sliding_window": None}
    save_small_model(name, directory, **fields)
    launcher = CountingLauncher(HostDevice().launcher)
    backend = host_backend(directory, HostDevice(launcher=launcher), graphs=False)
    assert isinstance(backend.forward, FusedLayers)
    backend.allocate(256, 72, 0)
    launcher.counts.clear()
    launcher.silence()  # the count is the same, and no key is computed
    shared, length = list(range(33)), 34 * 256 - 1
    decodes = [
        SequenceState(number, [1] * (length + 1), length, [*shared, 32 + number], 0, Sampling()) for number in (1, 2)
    ]
    short = SequenceState(3, [1] * 9, 9, [35], 0, Sampling())
    long = SequenceState(4, [1] * (length + 9), length + 9, list(range(36, 71)), 0, Sampling())
    with CountingOperators() as operators:
        backend.launch(
            [*(Scheduled(each, length, 1) for each in decodes), Scheduled(short, 0, 9), Scheduled(long, length, 9)]
        )
    return Counter({**launcher.counts, **operators.counts})


@pytest.mark.parametrize("name", [*COUNTED[:3], *(pytest.param(name, marks=pytest.mark.long) for name in COUNTED[3:])])
def test_launches_of_a_layer_in_the_fullest_step(tmp_path: Path, name: str) -> None:
    """Of a layer of each kind that the family has, beside one that sees all keys if it has any."""
    kinds = getattr((MODELS[name]() if name in MODELS else family_config(name)), "layer_types", None) or [""]
    first = next((kind for kind in kinds if kind != "sliding_attention"), kinds[0])
    for kind in sorted(set(kinds)):
        fewer, more = (fullest_step(tmp_path / f"{kind}{count}", name, [first] + count * [kind]) for count in (1, 2))
        assert two_more(fewer, more) == MOST_LAUNCHES, more - fewer


def test_launches_of_a_layer_of_transformers(tmp_path: Path) -> None:
    """So the count is one that sees what fused layers save."""
    assert min(of_a_layer(tmp_path, "llama", fused=False)) > 30


def test_a_row_does_not_depend_on_whether_layers_are_recorded(tmp_path: Path) -> None:
    save_small_model("llama", tmp_path)
    prompts = prompts_of([3, 17], seed=8)
    outputs = []
    for graphs in (True, False):
        driver = Driver(host_backend(tmp_path, graphs=graphs), 16)
        outputs.append(driver.generate([driver.sequence(prompt) for prompt in prompts], 6))
    assert outputs[0] == outputs[1]


def test_fp8_keys_and_values(tmp_path: Path) -> None:
    """Rotated keys are rounded once, to the pool's type."""
    save_small_model("llama", tmp_path)
    backend: CudaBackend = host_backend(tmp_path, dtype="bfloat16", kv_dtype="fp8")
    assert isinstance(backend.forward, FusedLayers)
    driver = Driver(backend, 16)
    assert len(driver.generate([driver.sequence([1, 2, 3])], 3)[0]) == 3


def test_pairs_of_different_angles_are_refused() -> None:
    angles = torch.rand(3, 8)
    with pytest.raises(ValueError, match="different angles"):
        _table(angles.cos(), angles.sin())
