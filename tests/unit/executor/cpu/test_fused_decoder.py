"""The decoder of compiled loops: logits of a step, and weights that are there once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cpu_driver import MODELS, WINDOW, prompts_of, save_config, save_model
from transformers import LlamaConfig, LlamaForCausalLM

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu import decoder_inputs, fused_decoder
from pagekv.executor.cpu.decoder_inputs import DecoderInputs
from pagekv.executor.cpu.forward import ModuleForward, StepForward
from pagekv.executor.cpu.fused_decoder import FusedDecoder
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.products import TorchProduct
from pagekv.executor.cpu.runner import plan_step
from pagekv.executor.model.decoder import read_decoder
from pagekv.executor.model.loading import LoadedModel, load_model

LENGTHS = (23, 6, 14)


@pytest.fixture
def threads() -> Iterator[int]:
    """The number of torch's threads, to which the tests return."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def fused(loaded: LoadedModel) -> FusedDecoder:
    decoder = read_decoder(loaded.model)
    assert decoder is not None
    return FusedDecoder(decoder, loaded.scores, loaded.num_heads, loaded.geometry.num_kv_heads)


@torch.inference_mode()
def logits(forward: StepForward, loaded: LoadedModel) -> list[torch.Tensor]:
    """Logits of three steps: prompts, a chunk beside two decodes, and three decodes."""
    prompts = prompts_of(list(LENGTHS))
    cache = KvCache(loaded.geometry, 4, 24)
    found = []
    for step in range(3):
        scheduled = []
        for index, prompt in enumerate(prompts):
            known, computed = len(prompt) - 2 + step, (0 if step == 0 else len(prompt) - 3 + step)
            if index == 0 and step < 2:
                # A prompt in two chunks.
                known, computed = (10, 0) if step == 0 else (len(prompt) - 1, 10)
            state = SequenceState(
                index, prompt[:known], known, list(range(index * 8, index * 8 + 8)), computed, Sampling()
            )
            scheduled.append(Scheduled(state, computed, known - computed))
        found.append(forward.logits(plan_step(cache, scheduled), cache).clone())
    return found


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "qwen3", "mistral", "gemma2"])
def test_logits_are_those_of_transformers_model(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    theirs = load_model(tmp_path, torch.float64)
    ours = load_model(tmp_path, torch.float32)
    for found, expected in zip(logits(fused(ours), ours), logits(ModuleForward(theirs.model), theirs), strict=True):
        assert found.shape == expected.shape == (3, theirs.vocab_size)
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_products_of_torch_and_a_step_that_samples_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors whose matrices torch multiplies faster; a prompt's chunk before its last has no logits."""
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    compiled = fused(loaded)
    expected = logits(compiled, loaded)
    monkeypatch.setattr("pagekv.executor.cpu.fused_decoder.fastest_product", lambda dtype: TorchProduct)
    other = load_model(tmp_path, torch.float32)
    forward = fused(other)
    for found, theirs in zip(logits(forward, other), expected, strict=True):
        assert torch.allclose(found, theirs, rtol=1e-4, atol=1e-4)
    state = SequenceState(1, prompts_of([9])[0], 9, [0, 1, 2], 0, Sampling())
    for way in (compiled, forward):
        cache = KvCache(loaded.geometry, 4, 3)
        with torch.inference_mode():
            assert way.logits(plan_step(cache, [Scheduled(state, 0, 5)]), cache).shape == (0, loaded.vocab_size)


def decodes(forward: StepForward, cache: KvCache, lengths: list[int], shared: int) -> torch.Tensor:
    """Logits of one decode each behind so many tokens, the first `shared` blocks of which are everybody's."""
    items = []
    for index, length in enumerate(lengths):
        own = range(8 + index * 8, 8 + index * 8 + 8)
        table = [*range(shared), *own][: -(-(length + 1) // cache.block_size)]
        tokens = [
            5 + (3 * place + (0 if place < shared * cache.block_size else index)) % 60 for place in range(length + 1)
        ]
        items.append(Scheduled(SequenceState(index, tokens, length, table, length, Sampling()), length, 1))
    return forward.logits(plan_step(cache, items), cache).clone()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_recorded_compute_the_same_numbers(
    name: str, dtype: torch.dtype, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: kinds of steps in turns, over more kinds than are kept, then over other pools."""
    # Not by their times, which others on the machine change: steps that torch computes cannot be recorded.
    monkeypatch.setattr(fused_decoder, "fastest_product", lambda dtype: Product)
    save_model(name, tmp_path)
    loaded = load_model(tmp_path, dtype)
    forward = fused(loaded)
    monkeypatch.setattr(fused_decoder, "MOST_RECORDINGS", 3)
    # Sharing a single block is worth it.
    monkeypatch.setattr("pagekv.executor.cpu.attention_plan.CALL_BYTES", 1)
    for seed in range(2):
        torch.manual_seed(seed)
        cache = KvCache(loaded.geometry, 4, 64)
        cache.device[:] = torch.randn(cache.device.shape)
        kinds: list[tuple[list[int], int, int]] = [
            ([9, 20, 30], 2, 2),
            ([13, 21, 31], 2, 2),
            ([9, 20], 0, 2),
            ([10, 12, 14, 16, 18], 1, 1),
            ([9, 20, 30], 2, 3),
        ]
        for lengths, shared, count in [*kinds, *reversed(kinds)]:
            torch.set_num_threads(count)
            found = []
            # The second time runs what the first one recorded; the third records nothing.
            for rows in (64, 64, 0):
                monkeypatch.setattr(decoder_inputs, "RECORDED_ROWS", rows)
                found.append(decodes(forward, cache, lengths, shared))
            assert found[0].isfinite().all()
            assert torch.equal(found[0], found[2])
            assert torch.equal(found[1], found[2])
    # The first pools are gone, and with them what was recorded over them.
    gc.collect()
    assert [*forward._recordings] == [cache]
    assert len(forward._recordings[cache]) == 3


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "table", "rope"),
    [
        ("llama", 2**14, "default"),
        ("mistral", 2**14, "default"),
        ("gemma2", 2**14, "default"),
        # Positions leave the table of rotations; and a model has none.
        ("llama", 32, "default"),
        ("llama", 2**14, "dynamic"),
    ],
)
def test_steps_that_follow_each_other_compute_the_same_numbers(
    name: str, table: int, rope: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as steps with plans of their own that are not recorded: over many blocks, behind a shared prefix,
    by other numbers of threads, and after a sequence has ended.
    """
    monkeypatch.setattr(fused_decoder, "fastest_product", lambda dtype: Product)
    monkeypatch.setattr("pagekv.executor.cpu.attention_plan.CALL_BYTES", 1)
    monkeypatch.setattr("pagekv.executor.cpu.rotations.POSITIONS", table)
    config = MODELS[name]()
    if rope == "dynamic":
        config.rope_parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    save_config(config, tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    forward = fused(loaded)
    made: set[int] = set()

    def noted(*given: Any) -> DecoderInputs:
        made.add(step)
        return decoder_inputs.decoder_inputs(*given)

    cache, other = (KvCache(loaded.geometry, 4, 128) for _ in range(2))
    cache.device[:] = torch.randn(cache.device.shape)
    other.device.copy_(cache.device)
    # Two sequences share two blocks, and a third has a table of its own, with room for 60 tokens more.
    tables = [[0, 1, *range(8, 38)], [0, 1, *range(40, 70)], list(range(96, 126))]
    states = [
        SequenceState(
            number, [(5 * place + number) % 60 for place in range(length + 1)], length, blocks, length, Sampling()
        )
        for number, (length, blocks) in enumerate(zip((9, 10, 3), tables, strict=True))
    ]
    plan = None
    for step in range(60):
        torch.set_num_threads(1 if step in (20, 21, 23) else 2)
        live = states if step < 50 else states[1:]
        scheduled = [Scheduled(state, state.computed_tokens, 1) for state in live]
        plan = plan_step(cache, scheduled, plan)
        with monkeypatch.context() as patched:
            patched.setattr(fused_decoder, "decoder_inputs", noted)
            rows = forward.logits(plan, cache).clone()
        found = {state.seq_id: row for (_, state), row in zip(plan.sampling, rows, strict=True)}
        with monkeypatch.context() as patched:
            patched.setattr(decoder_inputs, "RECORDED_ROWS", 0)
            anew = plan_step(other, scheduled)
            rows = forward.logits(anew, other)
        assert rows.isfinite().all()
        for (_, state), row in zip(anew.sampling, rows, strict=True):
            assert torch.equal(found[state.seq_id], row)
        for state in live:
            state.computed_tokens += 1
            state.token_ids.append((7 * step + state.seq_id) % 60)
    # Inputs are made at first, where the number of threads changes, where the window of "mistral" and "gemma2" begins
    # to hide something, where a sequence has ended, and where a table is full: tables have 8 blocks, then 16.
    expected = {0, 20, 22, 23, 24, 50}
    if name != "llama":
        expected |= {next(number for number in range(60) if 10 + number + 1 > WINDOW)}
    if table == 32:
        expected |= set(range(32 - 10, 60))
    if rope == "dynamic":
        expected = set(range(60))
    assert expected <= made
    assert len(made - expected) <= 3


@torch.inference_mode()
def test_queries_keys_and_values_of_a_row_may_be_as_long_as_the_row(tmp_path: Path) -> None:
    """Rows that a layer leaves, and their product with the weights of the next one, have one shape then."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    expected = decodes(ModuleForward(loaded.model, pack=False), KvCache(loaded.geometry, 4, 64), [9, 20, 30], 0)
    found = decodes(fused(loaded), KvCache(loaded.geometry, 4, 64), [9, 20, 30], 0)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_are_taken_not_copied(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    assert not loaded.model.config.tie_word_embeddings
    modules = [layer.mlp.down_proj for layer in loaded.model.model.layers] + [loaded.model.lm_head]
    before = [weakref.ref(module.weight) for module in modules]
    del modules
    forward = fused(loaded)
    gc.collect()
    assert [each() for each in before] == [None] * len(before)
    assert isinstance(forward, FusedDecoder)
