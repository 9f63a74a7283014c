"""The host's part of what fused layers add to a start of the cuda backend, at the shape of Llama 3 8B: processor time,
with kernels that compute nothing, on tensors without memory. `python tests/bench/bench_fused_start.py`

Steps by transformers are those that the fused ones are held against; without fused layers there are neither. Machine
code is read from a cache that an earlier read has filled. Without the driver's loading of it, and without the device's
time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import torch
from support.executor.cuda_host import HostDevice
from transformers import AutoModelForCausalLM, LlamaConfig

from pagekv.executor.cuda.choose_forward import _logits
from pagekv.executor.cuda.forward import TransformersForward
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.attention_interface import ATTENTION_NAME, Scores
from pagekv.executor.model.decoder import GatedProducts, read_decoder
from pagekv.executor.model.loading import BlockGeometry, LoadedModel
from pagekv.kernels.launch_config import LaunchConfig
from pagekv.kernels.machine_code import MachineCode
from pagekv.kernels.nvrtc import Nvrtc
from pagekv.kernels.params import Struct
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS, Variant

BAR_S = 2.0
ROUNDS = 3
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCAB_SIZE, POSITIONS = 32, 32, 8, 128, 128_256, 8192
# Of a fused step and no other.
FUSED_KERNELS = ("pagekv_add_norm", "pagekv_gated")

T = TypeVar("T")


class Silent:
    """A launcher that starts nothing."""

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        """Nothing is computed."""


def timed(what: str, function: Callable[[], T], rounds: int = ROUNDS) -> tuple[T, float]:
    """The result, and the least seconds of processor time."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        found = function()
        times.append(time.process_time() - began)
    print(f"{what}: {1e3 * min(times):.1f} ms, the least of {rounds} rounds")
    return found, min(times)


def eight_billion() -> LoadedModel:
    """Llama 3 8B without memory for its weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=14_336,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    model.train(False).requires_grad_(False)
    geometry = BlockGeometry(LAYERS, KV_HEADS, HEAD_SIZE, torch.bfloat16)
    scores = (Scores(HEAD_SIZE**-0.5),) * LAYERS
    return LoadedModel(model, geometry, HEADS, KV_HEADS, scores, VOCAB_SIZE, POSITIONS, ())


def read_machine_code() -> None:
    """The machine code of the kernels that fused layers add, from files."""
    code, variant = MachineCode(Nvrtc(12), 90), Variant("bfloat16", "bfloat16", HEAD_SIZE)
    for name in FUSED_KERNELS:
        kernel = KERNELS[name]
        code.file(translation_unit(kernel.source), kernel.source, kernel.options(variant))


def main() -> int:
    torch.set_num_threads(1)
    device = HostDevice(launcher=Silent(), torch_device=torch.device("meta"))
    loaded = eight_billion()
    decoder = read_decoder(loaded.model, experts=True)
    assert decoder is not None
    _, reference = timed(
        "two steps by transformers", lambda: _logits(TransformersForward(loaded.model), loaded, device)
    )
    # Tensors without memory are equal to nothing.
    with mock.patch.object(torch, "equal", return_value=True):
        fused, making = timed(
            "fused layers made", lambda: FusedLayers(decoder, loaded, device.launcher, device.torch_device), rounds=1
        )
    _, steps = timed("two fused steps", lambda: _logits(fused, loaded, device))
    read_machine_code()
    _, reading = timed(f"machine code of {len(FUSED_KERNELS)} kernels read", read_machine_code)
    joined = [layer.qkv.weight for layer in fused._layers]
    parts = [layer.feed_forward for layer in fused._layers]
    joined += [part.gate_up.weight for part in parts if isinstance(part, GatedProducts)]
    print(f"weights that are copied on the device: {sum(weight.nbytes for weight in joined) / 1e9:.1f} GB")
    total = reference + making + steps + reading
    print(f"bar: at most {BAR_S} s: {'met' if total <= BAR_S else 'MISSED'} by the host's part, {total:.2f} s; no GPU")
    return total > BAR_S


if __name__ == "__main__":
    sys.exit(main())
