"""The choice between compiled loops and transformers' model, and that it rests on the numbers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cpu_driver import save_config, save_model
from support.executor.families import family_config
from transformers import GPT2Config
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

from pagekv.executor.cpu import choose_forward, products
from pagekv.executor.cpu.choose_forward import LOOPS, load_forward
from pagekv.executor.cpu.experts import PackedExperts
from pagekv.executor.cpu.forward import ModuleForward, StepForward
from pagekv.executor.cpu.fused_decoder import FusedDecoder
from pagekv.executor.cpu.gathered_attention import GatheredStepAttention
from pagekv.executor.cpu.linear import PackedLinear
from pagekv.executor.cpu.native.step_attention import LoopStepAttention
from pagekv.executor.cpu.products import TorchProduct
from pagekv.executor.machine import TooLittleMemory
from pagekv.executor.model.decoder import EXPERT_FAMILIES, Decoder, DecoderLayer, read_decoder
from pagekv.executor.model.loading import LoadedModel, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_that_is_known_is_fused(llama: Path, dtype: torch.dtype) -> None:
    _, forward = load_forward(llama, dtype, fused=True)
    assert isinstance(forward, FusedDecoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(EXPERT_FAMILIES))
def test_a_family_with_experts_is_fused_and_its_experts_are_packed(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    save_config(family_config(family), tmp_path)
    loaded, forward = load_forward(tmp_path, dtype, fused=True)
    assert isinstance(forward, FusedDecoder)
    assert not [name for name, _ in loaded.model.named_parameters() if "expert" in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "gpt-oss"])
def test_of_other_families_the_loops_compute_attention(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_model(family, tmp_path)
    _, forward = load_forward(tmp_path, dtype, fused=True)
    assert isinstance(forward, ModuleForward)
    assert forward._attention is LoopStepAttention


@pytest.mark.parametrize("context", [2, 24])
def test_a_model_of_a_short_context_is_compared_within_it(tmp_path: Path, context: int) -> None:
    """Learned positions end with it."""
    save_config(GPT2Config(n_positions=context, n_embd=48, n_layer=1, n_head=4, vocab_size=64), tmp_path)
    for fused in (True, False):
        loaded, forward = load_forward(tmp_path, torch.float32, fused=fused)
        assert isinstance(forward, ModuleForward)
        assert (forward._attention is LoopStepAttention) == fused
        assert len(choose_forward._logits(forward, loaded)) == {2: 4, 24: 7}[context]


def test_what_is_not_asked_for_or_not_possible_is_left_to_transformers(llama: Path) -> None:
    for dtype, fused in ((torch.float32, False), (torch.float64, True)):
        _, forward = load_forward(llama, dtype, fused=fused)
        assert isinstance(forward, ModuleForward)
        assert forward._attention is GatheredStepAttention


def test_attention_that_computes_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("gpt2", tmp_path)
    right, reference = load_forward(tmp_path, torch.float32, fused=False)
    expected = choose_forward._logits(reference, right)
    attend = LoopStepAttention.attend
    monkeypatch.setattr(LoopStepAttention, "attend", lambda *given: attend(*given) * 0.9)
    loaded, forward = load_forward(tmp_path, torch.float32, fused=True)
    assert isinstance(forward, ModuleForward)
    assert forward._attention is GatheredStepAttention
    assert torch.equal(choose_forward._logits(forward, loaded), expected)


def test_without_numba(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_forward, "find_spec", lambda name: None)
    _, forward = load_forward(llama, torch.float32, fused=True)
    assert isinstance(forward, ModuleForward)


def test_loops_that_compute_something_else_are_not_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a family that changed in a release of transformers. The model is loaded anew, with all its weights."""
    right, reference = load_forward(llama, torch.float32, fused=False)
    expected = choose_forward._logits(reference, right)

    def changed(model: object) -> object:
        decoder = read_decoder(model)
        assert decoder is not None
        decoder.residual_factor = 0.9
        return decoder

    monkeypatch.setattr(choose_forward, "read_decoder", changed)
    loaded, forward = load_forward(llama, torch.float32, fused=True)
    assert isinstance(forward, ModuleForward)
    assert torch.equal(choose_forward._logits(forward, loaded), expected)


def test_loops_that_cannot_be_compiled_are_not_used(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a Numba that does not take the installed NumPy. The model is loaded anew where weights were taken."""
    caplog.set_level("INFO")
    take = Decoder.take_layer

    def broken(decoder: Decoder, index: int) -> DecoderLayer:
        if index == 1:
            raise ImportError("Numba needs NumPy 2.1 or less\nand more of it")
        return take(decoder, index)

    monkeypatch.setattr(Decoder, "take_layer", broken)
    loaded, forward = load_forward(llama, torch.float32, fused=True)
    assert isinstance(forward, ModuleForward)
    assert choose_forward._logits(forward, loaded).isfinite().all()
    reasons = [getattr(record, "fields", {}).get("reason") for record in caplog.records]
    assert "the compiled loops failed: ImportError: Numba needs NumPy 2.1 or less" in reasons


def test_ranks_compute_in_one_way_and_tell_a_failure_from_a_difference(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank fails, others may wait for it in the middle of a step."""

    def broken(*_: object) -> None:
        raise KeyError("no such name")

    class Among(Shards):
        """A rank among such as refuse."""

        def __init__(self) -> None:
            super().__init__(World(0, 2, 2), pytest.fail)
            self.failed: list[bool] = []

        def why_not_all(self, reason: str, remedy: str, *, failed: bool) -> str:
            self.failed.append(failed)
            return reason or "another rank cannot"

    loops = choose_forward._loops
    monkeypatch.setattr(choose_forward, "_loops", lambda loaded, shards: loops(loaded, None))
    shards, found = Among(), []
    found.append(choose_forward._checked(load_model(llama, torch.float32), torch.float32, shards, LOOPS))
    monkeypatch.setattr(choose_forward, "_agree", lambda *given: False)
    found.append(choose_forward._checked(load_model(llama, torch.float32), torch.float32, shards, LOOPS))
    monkeypatch.setattr(choose_forward, "_loops", broken)
    found.append(choose_forward._checked(load_model(llama, torch.float32), torch.float32, shards, LOOPS))
    assert found == [
        "another rank cannot",
        "the compiled loops compute other logits than transformers: please report this model",
        "the compiled loops failed: KeyError: 'no such name'",
    ]
    assert shards.failed == [False, False, True]


@pytest.mark.parametrize("fused", [True, False])
def test_layers_whose_weights_a_model_reads_itself_stay_as_they_are(
    tmp_path: Path, fused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a router of LongCat-Flash does, which multiplies in float32."""
    caplog.set_level("INFO")

    def forward(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = mlp.c_proj(torch.nn.functional.linear(hidden, mlp.c_fc.weight))
        return down

    monkeypatch.setattr(Starcoder2MLP, "forward", forward)
    save_config(family_config("starcoder2"), tmp_path)
    plain = load_model(tmp_path, torch.float32)
    expected = choose_forward._logits(ModuleForward(plain.model, pack=False), plain)
    loaded, chosen = load_forward(tmp_path, torch.float32, fused=fused)
    torch.testing.assert_close(choose_forward._logits(chosen, loaded), expected)
    reasons = {record.message: getattr(record, "fields", {}).get("reason") for record in caplog.records}
    assert "repacked linear layers failed: TypeError" in str(
        reasons["steps are not computed by repacked linear layers"]
    )
    assert fused == ("steps are not computed by the compiled loops" in reasons)


def test_layers_that_compute_something_else_when_repacked_stay_as_they_are(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_model(llama, torch.float32)
    expected = choose_forward._logits(ModuleForward(plain.model, pack=False), plain)
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda *given: forward(*given) * 0.9)
    loaded, chosen = load_forward(llama, torch.float32, fused=False)
    torch.testing.assert_close(choose_forward._logits(chosen, loaded), expected)


def test_too_little_memory_for_repacked_layers_ends_the_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for weights that are loaded. The model cannot help it."""

    def refused(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(PackedLinear, "__init__", refused)
    with pytest.raises(TooLittleMemory, match=r"^repacking .* linear layers needs more memory than there is; .*: use"):
        load_forward(llama, torch.float32, fused=False)


def test_products_that_fail_behind_the_first_layers_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of transformers' model were replaced by then: the model is loaded anew, with all its weights."""
    save_model("gpt2", tmp_path)
    right, reference = load_forward(tmp_path, torch.float32, fused=False)
    expected = choose_forward._logits(reference, right)
    made: list[TorchProduct] = []

    def fails_later(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchProduct:
        if len(made) == 3:
            raise MemoryError
        made.append(TorchProduct(weight, bias))
        return made[-1]

    monkeypatch.setattr(products, "fastest_product", lambda dtype: fails_later)
    loaded, forward = load_forward(tmp_path, torch.float32, fused=True)
    assert len(made) == 3
    assert isinstance(forward, ModuleForward)
    assert forward._attention is GatheredStepAttention
    assert torch.equal(choose_forward._logits(forward, loaded), expected)


def test_a_model_is_not_there_twice(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it is loaded anew, where none of its weights were taken."""
    models: list[weakref.ref[torch.nn.Module]] = []

    def loaded_alone(*args: Any, **options: Any) -> LoadedModel:
        assert [model() for model in models] == [None] * len(models)
        loaded = load_model(*args, **options)
        models.append(weakref.ref(loaded.model))
        return loaded

    def broken(*_: object) -> None:
        raise ImportError("Numba needs NumPy 2.1 or less")

    monkeypatch.setattr(choose_forward, "load_model", loaded_alone)
    monkeypatch.setattr(choose_forward, "_loops", broken)
    _, forward = load_forward(llama, torch.float32, fused=True)
    assert isinstance(forward, ModuleForward)
    assert len(models) == 2


@pytest.mark.parametrize("fused", [True, False])
def test_experts_that_are_all_but_equally_good_are_no_difference(tmp_path: Path, fused: bool) -> None:
    """Rounding chooses one of them, and the other gives a row quite different numbers."""
    config = family_config("mixtral", num_experts_per_tok=1)
    model = save_config(config, tmp_path)
    for layer in model.model.layers:
        router = layer.mlp.gate.weight.data
        router[1] = router[0] + 1e-7 * torch.randn(router.shape[1])
    model.save_pretrained(tmp_path)
    _, forward = load_forward(tmp_path, torch.float32, fused=fused)
    assert isinstance(forward, FusedDecoder) == fused
    if isinstance(forward, ModuleForward):
        assert any(isinstance(each, PackedExperts) for each in forward._model.modules())


def test_experts_that_compute_something_else_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(family_config("qwen3_moe"), tmp_path)
    right, reference = load_forward(tmp_path, torch.float32, fused=False)
    expected = choose_forward._logits(reference, right)
    forward = PackedExperts.forward
    monkeypatch.setattr(PackedExperts, "forward", lambda *given: forward(*given) * 0.9)
    loaded, chosen = load_forward(tmp_path, torch.float32, fused=True)
    assert isinstance(chosen, ModuleForward)
    torch.testing.assert_close(choose_forward._logits(chosen, loaded), expected)


def test_routers_that_choose_something_else_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though experts compute as they do in transformers' model."""
    save_config(family_config("qwen3_moe"), tmp_path)
    make = choose_forward._loops

    def other(loaded: LoadedModel, shards: Shards | None) -> StepForward:
        for layer in loaded.model.model.layers:
            layer.mlp.gate.weight.data.neg_()
        return make(loaded, shards)

    monkeypatch.setattr(choose_forward, "_loops", other)
    _, forward = load_forward(tmp_path, torch.float32, fused=True)
    assert isinstance(forward, ModuleForward)
