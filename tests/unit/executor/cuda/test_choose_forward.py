"""The choice between fused layers and transformers' model, and that it rests on the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cuda_host import HostDevice, save_small_model
from support.kernels.host_build import HostLauncher

from pagekv.executor.cuda import choose_forward
from pagekv.executor.cuda.choose_forward import check_wgmma_prefill, load_forward
from pagekv.executor.cuda.forward import TransformersForward
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.decoder import Decoder, DecoderLayer, read_decoder
from pagekv.executor.model.loading import LoadedModel, load_model
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


def loader(directory: Path, dtype: torch.dtype = torch.float32) -> Callable[[], LoadedModel]:
    return lambda: load_model(directory, dtype)


def reasons(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [getattr(record, "fields", {}).get("reason") for record in caplog.records]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_family_that_is_known_is_fused(llama: Path, dtype: torch.dtype) -> None:
    _, forward = load_forward(loader(llama, dtype), HostDevice(), fused=True)
    assert isinstance(forward, FusedLayers)


def test_what_is_not_asked_for_or_not_known_is_left_to_transformers(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_small_model("gpt2", tmp_path)
    for path, fused in ((llama, False), (tmp_path, True)):
        _, forward = load_forward(loader(path), HostDevice(), fused=fused)
        assert isinstance(forward, TransformersForward)
    assert "no fused layers for models of type gpt2" in reasons(caplog)


def test_layers_that_compute_something_else_are_not_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a family that changed in a release of transformers. The model is loaded anew, with all its weights."""
    device = HostDevice()
    right, reference = load_forward(loader(llama), device, fused=False)
    expected = choose_forward._logits(reference, right, device)

    def changed(model: Any, **options: bool) -> Decoder:
        decoder = read_decoder(model, **options)
        assert decoder is not None
        decoder.residual_factor = 0.9
        return decoder

    monkeypatch.setattr(choose_forward, "read_decoder", changed)
    loaded, forward = load_forward(loader(llama), device, fused=True)
    assert isinstance(forward, TransformersForward)
    assert torch.equal(choose_forward._logits(forward, loaded, device), expected)


def test_layers_that_fail_are_not_used(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where rows are no multiple of 16 bytes. The model is loaded anew where weights were taken."""
    caplog.set_level("INFO")
    take, device = Decoder.take_layer, HostDevice()

    def broken(decoder: Decoder, index: int) -> DecoderLayer:
        if index == 1:
            raise ValueError("rows: must be float32\nand more of it")
        return take(decoder, index)

    monkeypatch.setattr(Decoder, "take_layer", broken)
    loaded, forward = load_forward(loader(llama), device, fused=True)
    assert isinstance(forward, TransformersForward)
    assert choose_forward._logits(forward, loaded, device).isfinite().all()
    assert "the fused layers failed: ValueError: rows: must be float32" in reasons(caplog)
    assert [record.levelname for record in caplog.records if "slower" in record.message] == ["WARNING"]


def test_a_device_that_is_lost_is_no_reason_for_another_way(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not loaded again onto it, and the first error is told."""

    class Lost(HostDevice):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    loads = []

    def load() -> LoadedModel:
        loads.append(load_model(llama, torch.float32))
        return loads[-1]

    def broken(*_: object) -> DecoderLayer:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(Decoder, "take_layer", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load_forward(load, Lost(), fused=True)
    assert len(loads) == 1


@pytest.mark.kernels
def test_prompts_by_warpgroups_are_held_against_the_other_kernel(llama: Path) -> None:
    """At the start, in whichever way layers are computed. A difference or a failure ends it in one line."""

    class Refusing(HostLauncher):
        """Has no thread blocks for the kernel by warpgroups."""

        def launch(self, kernel: str, *args: Any) -> None:
            if kernel == "pagekv_prefill_wgmma":
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument\nand more of it")
            super().launch(kernel, *args)

    def halved(text: str) -> str:
        """The kernel by warpgroups with scores of half the size; any other one as it is."""
        return text.replace("Logits::of(p.scale", "Logits::of(0.5f * p.scale") if "prefill_wgmma(" in text else text

    for fused in (False, True):
        device = HostDevice()
        loaded, forward = load_forward(loader(llama, torch.float16), device, fused=fused)
        check_wgmma_prefill(loaded, forward, device)
    for launcher, reason in (
        (HostLauncher(edit=halved), "prompts differ from those of the other kernel: leave the flag out"),
        (Refusing(), "prompts by warpgroups failed: RuntimeError: CUDA_ERROR_INVALID_VALUE: invalid argument: leave"),
    ):
        with pytest.raises(ValueError, match=f"--wgmma-prefill: {reason}"):
            check_wgmma_prefill(loaded, forward, HostDevice(launcher=launcher))


class Among(Shards):
    """A rank among such as refuse."""

    def __init__(self) -> None:
        super().__init__(World(0, 2, 2), pytest.fail)
        self.failed: list[bool] = []

    def why_not_all(self, reason: str, remedy: str, *, failed: bool) -> str:
        self.failed.append(failed)
        return reason or "another rank cannot"


def test_ranks_compute_in_one_way_and_tell_a_failure_from_a_difference(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank fails, others may wait for it in the middle of a step."""

    def broken(*_: object) -> None:
        raise KeyError("no such name")

    monkeypatch.setattr(choose_forward, "_logits", lambda *args, **options: torch.ones(2, 4))
    monkeypatch.setattr(choose_forward, "FusedLayers", lambda *parts: FusedLayers(*parts[:-1]))
    shards, device, found = Among(), HostDevice(), []
    found.append(choose_forward._checked(load_model(llama, torch.float32), device, shards))
    monkeypatch.setattr(choose_forward, "_agree", lambda *given: False)
    found.append(choose_forward._checked(load_model(llama, torch.float32), device, shards))
    monkeypatch.setattr(choose_forward, "FusedLayers", broken)
    found.append(choose_forward._checked(load_model(llama, torch.float32), device, shards))
    assert found == [
        "another rank cannot",
        "the fused layers compute other logits than transformers: please report this model",
        "the fused layers failed: KeyError: 'no such name'",
    ]
    assert shards.failed == [False, False, True]


def test_all_ranks_refuse_prompts_by_warpgroups_where_one_does(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it else."""
    loaded, forward = load_forward(loader(llama), HostDevice(), fused=False)
    monkeypatch.setattr(choose_forward, "_logits", lambda *args, **options: torch.ones(2, 4))
    check_wgmma_prefill(loaded, forward, HostDevice())
    with pytest.raises(ValueError, match="--wgmma-prefill: another rank cannot: leave the flag out"):
        check_wgmma_prefill(loaded, forward, HostDevice(), Among())
