"""Chooses how steps are computed: in fused layers, if `Decoder` describes the model's family and the logits of a few
tokens agree with transformers'; else by transformers' model. Also compares the warpgroup prefill kernel with the
portable one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagekv.common.logs import Log
from pagekv.common.phases import phase
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.cuda.forward import DeviceForward, TransformersForward
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.cuda.kernel_attention import KernelAttention, make_attention
from pagekv.executor.cuda.pools import KvPools
from pagekv.executor.model.attention_interface import LAST_ROW
from pagekv.executor.model.decoder import read_decoder
from pagekv.executor.model.loading import LoadedModel
from pagekv.executor.model.shards import Shards
from pagekv.executor.model.tensor_parallel import keeps_heads
from pagekv.kernels.attention_plan import StepBatch

log = Log(__name__)

# Tokens of the check: a prompt, and one token after it. The warpgroup kernel reads tiles of 128 keys and has two
# buffers in shared memory: with a fourth tile both buffers have been used twice.
CHECKED_TOKENS, WGMMA_TOKENS, BLOCK_SIZE = 9, 3 * 128 + 9, 4
# Largest difference relative to the largest logit. Correct results differ by rounding, wrong ones by about the largest
# logit itself.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def check_wgmma_prefill(
    loaded: LoadedModel, forward: DeviceForward, device: CudaDevice, shards: Shards | None = None
) -> None:
    """Compares the logits of a prompt by the warpgroup kernel with those of the portable kernel. Raises ValueError, on
    all ranks of a group, if they differ or the kernel fails.
    """
    failed, tokens = False, min(WGMMA_TOKENS, loaded.max_model_len)
    with phase("checking prompts by warpgroups"):
        expected = _logits(forward, loaded, device, tokens)
        try:
            found = _logits(forward, loaded, device, tokens, wgmma_prefill=True)
            reason = "" if _agree(loaded, found, expected) else "prompts differ from those of the other kernel"
        except Exception as error:
            failed, reason = True, _failed("prompts by warpgroups", error)
    if shards is not None:
        reason = shards.why_not_all(reason, "leave --wgmma-prefill out", failed=failed)
    if reason:
        raise ValueError(f"--wgmma-prefill: {reason}: leave the flag out, and report this GPU and model")


def load_forward(
    load: Callable[[], LoadedModel], device: CudaDevice, *, fused: bool, shards: Shards | None = None
) -> tuple[LoadedModel, DeviceForward]:
    """Loads the model and chooses how its steps are computed. `fused`: in fused layers if possible; if they fail, the
    model is loaded a second time. `shards`: the ranks of a split model, which all have to choose the same way. Raises
    as `load`.
    """
    loaded = load()
    if not fused:
        return loaded, TransformersForward(loaded.model)
    if reason := _why_not(loaded):
        log.info("steps are computed by transformers' model", reason=reason)
        return loaded, TransformersForward(loaded.model)
    found = _checked(loaded, device, shards)
    if not isinstance(found, str):
        log.info("steps are computed in fused layers", model_type=loaded.model.config.model_type)
        return loaded, found
    # The fused layers have taken the weights out of the model.
    del loaded
    loaded = load()
    log.warning("steps are computed by transformers' model, slower", reason=found)
    return loaded, TransformersForward(loaded.model)


def _why_not(loaded: LoadedModel) -> str:
    """The reason why there are no fused layers for this model, the same on all ranks; empty if they may be tried."""
    kind = loaded.model.config.model_type
    if read_decoder(loaded.model, experts=True) is None:
        return f"no fused layers for models of type {kind}"
    return "" if keeps_heads(loaded.model) else f"ranks of models of type {kind} gather the heads of a layer"


def _checked(loaded: LoadedModel, device: CudaDevice, shards: Shards | None) -> DeviceForward | str:
    """The fused layers, which take the model's weights; or the reason why this rank or another one cannot use them."""
    failed, reason = False, ""
    with phase("checking the fused layers"):
        expected = _logits(TransformersForward(loaded.model), loaded, device)
        try:
            decoder = read_decoder(loaded.model, experts=True)
            assert decoder is not None
            forward = FusedLayers(decoder, loaded, device.launcher, device.torch_device, shards)
            if not _agree(loaded, _logits(forward, loaded, device), expected):
                reason = "the fused layers compute other logits than transformers: please report this model"
        # A model unlike the rest of its family, or rows that no kernel can read, can raise anything.
        except Exception as error:
            # Raises if a kernel fault has made the device unusable: then nothing else could compute either.
            device.synchronize()
            failed, reason = True, _failed("the fused layers", error)
    if shards is not None:
        reason = shards.why_not_all(reason, "start with --no-fused", failed=failed)
    return reason or forward


def _failed(subject: str, error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{subject} failed: {type(error).__name__}: {first_line}"


def _agree(loaded: LoadedModel, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the logits differ by rounding alone. NaN agrees with nothing."""
    return bool((found - expected).abs().max() <= TOLERANCE[loaded.geometry.dtype] * expected.abs().max())


@torch.inference_mode()
def _logits(
    forward: DeviceForward,
    loaded: LoadedModel,
    device: CudaDevice,
    count: int = CHECKED_TOKENS,
    *,
    wgmma_prefill: bool = False,
) -> torch.Tensor:
    """Logits `[2, num_logits]` of the last token of a prompt of `count - 1` tokens, and of one token after it, over a
    pool of the weights' type.
    """
    num_blocks = -(-count // BLOCK_SIZE)
    pools = KvPools(loaded.geometry, BLOCK_SIZE, num_blocks, device)
    attention = make_attention(loaded, pools.device, device.launcher, wgmma_prefill=wgmma_prefill)
    where = device.torch_device
    found = []
    for start, end in ((0, count - 1), (count - 1, count)):
        batch = StepBatch(
            query_start=np.array([0, end - start], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            decodes=np.array([start > 0]),
        )
        host = attention.planner.step(batch)
        words = torch.from_numpy(host.words).to(where, copy=True)
        scratch = torch.empty(attention.scratch_bytes(host.counts["num_partials"]), dtype=torch.uint8, device=where)
        plan = host.bind(words.data_ptr(), scratch.data_ptr() if len(scratch) else 0)
        tokens = torch.tensor([index % loaded.vocab_size for index in range(start + 1, end + 1)], device=where)
        positions = torch.arange(start, end, device=where)
        found.append(forward.logits(tokens.int(), positions.int(), LAST_ROW, KernelAttention(attention, plan))[-1])
    return torch.stack(found).float()
