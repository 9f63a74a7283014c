"""The cache write as its kernel can do it too: keys rotated by RoPE on the way, queries in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagekv.kernels import launch_config
from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.params import CACHE_WRITE, fill


@dataclass(frozen=True)
class Rope:
    """Angles of the rotation."""

    table: torch.Tensor
    """float32 [positions, rotary_dim]: the cosines of a position's rotary_dim / 2 angles, then their sines."""
    interleaved: bool = False
    """False: element i pairs with i + rotary_dim / 2 (Llama in transformers). True: neighbours are pairs."""


def write(
    attention: PagedAttention,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    plan: AttentionPlan,
    rope: Rope,
) -> None:
    """As `PagedAttention.write`, of rows that are side by side."""
    kv_stride = attention.block_size * attention.num_kv_heads * attention.variant.head_size
    params = fill(
        CACHE_WRITE,
        key=key.data_ptr(),
        value=value.data_ptr(),
        query=query.data_ptr(),
        pool=attention._pool.data_ptr(),
        slots=plan.at["slots"],
        rope=rope.table.data_ptr(),
        positions=plan.at["positions"],
        block_stride=attention.num_layers * 2 * kv_stride,
        kv_stride=kv_stride,
        key_stride=key.stride()[0],
        value_stride=value.stride()[0],
        query_stride=query.stride()[0],
        num_tokens=plan.num_rows,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        block_size_log2=attention.block_size.bit_length() - 1,
        layer=layer,
        rotary_dim=rope.table.shape[1],
        rope_interleaved=int(rope.interleaved),
        kv_scales=0,
    )
    shape = launch_config.cache_write(plan.num_rows)
    attention._launcher.launch("pagekv_cache_write", attention.variant, shape, params)
