"""The choice between fused layers and transformers' model, and that it rests on the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cuda_host import HostDevice, save_small_model

from pagekv.executor.cuda import choose_forward
from pagekv.executor.cuda.choose_forward import load_forward
from pagekv.executor.cuda.forward import TransformersForward
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.decoder import Decoder, DecoderLayer, read_decoder
from pagekv.executor.model.loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_small_model("llama", directory)
    return directory


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
