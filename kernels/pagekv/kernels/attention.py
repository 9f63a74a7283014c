"""Paged attention over a block pool: the interface that an executor uses. Imports neither CuPy nor torch; a tensor is
anything with `data_ptr()`, `shape`, `stride()` and `dtype` (torch's, on any device).

    attention = PagedAttention(CupyLauncher(), pool, variant, num_heads=32)
    plan = attention.planner.step(batch).bind(...)  # attention_plan.py: once a step
    for layer in range(num_layers):
        attention.write(layer, key, value, plan)    # the new tokens' keys and values into their slots
        attention.attend(layer, query, out, plan)   # decode, merge and prefill, as far as the step has such rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagekv.kernels import launch_config
from pagekv.kernels.attention_launch import launch_attention
from pagekv.kernels.attention_plan import AttentionPlan, StepPlanner
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import BLOCK_COPY, CACHE_WRITE, fill
from pagekv.kernels.prefill_splits import SPLIT_RULE, partial_bytes
from pagekv.kernels.rows import Norm
from pagekv.kernels.tensors import Tensor, dtype_name
from pagekv.kernels.variants import BLOCK_SIZES, UnsupportedVariant, Variant, check_heads, check_wgmma

LAYOUT_AXES = ("num_blocks", "num_layers", "2", "block_size", "num_kv_heads", "head_size")
MAX_POOL_ROWS = 2**32
"""Row indices of the decode kernel have 32 bits; at 256 bytes a row that is a terabyte."""


class PagedAttention:
    """The attention of one model over one block pool. Holds no state of a step."""

    def __init__(
        self,
        launcher: Launcher,
        pool: Tensor,
        variant: Variant,
        *,
        num_heads: int,
        scale: float | None = None,
        windows: Sequence[int] = (),
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
        wgmma_prefill: bool = False,
    ) -> None:
        """`pool`: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_size], contiguous, of `variant.kv_dtype`.

        `scale`: multiplies the logits; default 1 / sqrt(head_size). `windows`: per layer, how many keys a query sees,
        itself included; 0 or absent: all. `soft_cap`: logits become cap * tanh(logit / cap); 0: none.
        `sinks`: float32 [num_layers, num_heads] on the device, contiguous: a logit of each head that takes part in the
        softmax and has no value; minus infinity in layers without sinks.
        `kv_scales`: for an fp8 pool, float32 [num_layers, 2, num_kv_heads] on the device, contiguous: the factors of
        stored keys and of stored values of each head; default 1.
        `wgmma_prefill`: prompts use the kernel for Hopper, so the launcher's GPU must be one, and the variant one that
        `check_wgmma` accepts.

        Raises UnsupportedVariant, naming the field, for a combination that no kernel serves, and ValueError for a pool
        that does not match the variant.
        """
        if len(pool.shape) != len(LAYOUT_AXES) or pool.shape[2] != 2:
            raise ValueError(f"pool: must be [{', '.join(LAYOUT_AXES)}], got {tuple(pool.shape)}")
        self.num_blocks, self.num_layers, _, self.block_size, self.num_kv_heads, head_size = map(int, pool.shape)
        if head_size != variant.head_size:
            raise ValueError(f"pool: head size must be the variant's {variant.head_size}, got {head_size}")
        if dtype_name(pool) != variant.kv_dtype:
            raise ValueError(f"pool: must be of the variant's {variant.kv_dtype}, got {dtype_name(pool)}")
        if self.block_size not in BLOCK_SIZES:
            raise UnsupportedVariant(f"block_size: must be a power of two from 1 to 256, got {self.block_size}")
        rows = self.num_blocks * self.num_layers * 2 * self.block_size
        if rows > MAX_POOL_ROWS:
            raise UnsupportedVariant(
                f"pool: at most {MAX_POOL_ROWS} rows (a token's keys or values of a layer), got {rows}"
            )
        check_heads(num_heads, self.num_kv_heads)
        if wgmma_prefill:
            check_wgmma(variant)
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            # Prefill finds the largest logit by the largest dot product.
            raise ValueError(f"scale: must be finite and more than 0, got {scale}")
        if not math.isfinite(soft_cap) or soft_cap < 0:
            raise ValueError(f"soft_cap: must be finite and at least 0, got {soft_cap}")
        if len(windows) not in (0, self.num_layers):
            raise ValueError(f"windows: must have {self.num_layers} entries, one a layer, got {len(windows)}")
        if any(window < 0 for window in windows):
            raise ValueError(f"windows: must be at least 0, got {list(windows)}")
        if sinks is not None and (tuple(sinks.shape), dtype_name(sinks)) != ((self.num_layers, num_heads), "float32"):
            raise ValueError(
                f"sinks: must be float32 {(self.num_layers, num_heads)}, got {dtype_name(sinks)} {tuple(sinks.shape)}"
            )
        of_heads = (self.num_layers, 2, self.num_kv_heads)
        if kv_scales is not None and (tuple(kv_scales.shape), dtype_name(kv_scales)) != (of_heads, "float32"):
            raise ValueError(
                f"kv_scales: must be float32 {of_heads}, got {dtype_name(kv_scales)} {tuple(kv_scales.shape)}"
            )
        if (any(windows) or soft_cap or sinks is not None) and not variant.features:
            raise UnsupportedVariant("features: window, soft cap and sinks need a variant with features")
        self.variant = variant
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(head_size) if scale is None else scale
        self.soft_cap = soft_cap
        self._windows = tuple(windows) or (0,) * self.num_layers
        window = 0 if 0 in self._windows else max(self._windows)
        self.planner = StepPlanner(self.num_blocks, self.block_size, num_heads, self.num_kv_heads, variant, window)
        self._launcher, self._wgmma_prefill = launcher, wgmma_prefill
        # Keep the memory behind the addresses below.
        self._pool, self._sinks, self._kv_scales = pool, sinks, kv_scales
        kv_stride = self.block_size * self.num_kv_heads * head_size
        # Fields that the kernels of cache write, decode and prefill all have.
        self._fields: dict[str, float] = {
            "pool": pool.data_ptr(),
            "block_stride": self.num_layers * 2 * kv_stride,
            "kv_stride": kv_stride,
            "num_heads": num_heads,
            "num_kv_heads": self.num_kv_heads,
            "block_size_log2": self.block_size.bit_length() - 1,
        }

    def scratch_bytes(self, num_partials: int) -> int:
        """Bytes of device memory for a step's partial results: outputs, then (maximum, sum) pairs, float32."""
        return num_partials * partial_bytes(self.num_heads, self.variant.head_size)

    def most_prompt_scratch(self, num_rows: int, context_len: int) -> int:
        """The most bytes of a step's partial results of prompts that have `num_rows` rows together, in contexts of up
        to `context_len` tokens."""
        return self.scratch_bytes(num_rows * SPLIT_RULE.most_partials(context_len, self.planner.window))

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        plan: AttentionPlan,
        *,
        query: Tensor | None = None,
        norm: Norm | None = None,
        rope: Tensor | None = None,
    ) -> None:
        """Stores keys and values ([rows, num_kv_heads, head_size]; rows may be apart) in the slots of the plan's rows.

        `norm`: normalises keys before they are stored, and queries in place. With a weight [num_heads + num_kv_heads,
        head_size], queries first, it normalises each head by itself. With a weight of as many elements in one
        dimension, it normalises all query heads of a row together, and all key heads. `rope`: rotates queries and keys
        then; float32 [positions, rotary_dim], contiguous: for each position cosines, then sines. The elements of a pair
        are rotary_dim / 2 apart. Either needs `query` ([rows, num_heads, head_size]; rows may be apart). Raises
        ValueError for other shapes.
        """
        self._check_layer(layer)
        if not plan.num_rows:
            return
        self._check_rows("key", key, plan, self.num_kv_heads)
        self._check_rows("value", value, plan, self.num_kv_heads)
        changes = norm is not None or rope is not None
        if changes != (query is not None):
            raise ValueError("query: needed with a norm or a rope, and with them alone")
        if query is not None:
            self._check_rows("query", query, plan, self.num_heads)
        kernel, num_heads = "pagekv_cache_write", self.num_kv_heads + (0 if query is None else self.num_heads)
        config = launch_config.cache_write(self.variant, plan.num_rows, num_heads)
        if norm is not None and len(norm.weight.shape) == 1:
            kernel, config = "pagekv_cache_write_together", launch_config.cache_write_together(plan.num_rows)
        self._launcher.launch(
            kernel,
            self.variant,
            config,
            fill(
                CACHE_WRITE,
                key=key.data_ptr(),
                value=value.data_ptr(),
                query=0 if query is None else query.data_ptr(),
                slots=plan.at["slots"],
                positions=plan.at["positions"],
                key_stride=key.stride()[0],
                value_stride=value.stride()[0],
                query_stride=0 if query is None else query.stride()[0],
                layer=layer,
                kv_scales=self._kv_scales_of(layer),
                **self._norm(norm),
                **self._rope(rope),
                **self._fields,
            ),
        )

    def _kv_scales_of(self, layer: int) -> int:
        """The address of a layer's scales; 0: all are 1."""
        return 0 if self._kv_scales is None else self._kv_scales.data_ptr() + 8 * layer * self.num_kv_heads

    def _norm(self, norm: Norm | None) -> dict[str, float]:
        if norm is None:
            return {"norm_weight": 0, "norm_eps": 0.0}
        shape = (self.num_heads + self.num_kv_heads, self.variant.head_size)
        shapes = (shape, (math.prod(shape),))
        if tuple(norm.weight.shape) not in shapes or dtype_name(norm.weight) != "float32":
            raise ValueError(
                f"norm: needs a weight float32 {shapes[0]} or {shapes[1]}, got {dtype_name(norm.weight)} "
                f"{tuple(norm.weight.shape)}"
            )
        return {"norm_weight": norm.weight.data_ptr(), "norm_eps": norm.eps}

    def _rope(self, rope: Tensor | None) -> dict[str, float]:
        if rope is None:
            return {"rope": 0, "rotary_dim": 0}
        rotary_dim = int(rope.shape[-1])
        if dtype_name(rope) != "float32" or rotary_dim % 2 or rotary_dim > self.variant.head_size:
            raise ValueError(
                f"rope: must be float32 with an even number of columns, at most {self.variant.head_size}, got "
                f"{dtype_name(rope)} {tuple(rope.shape)}"
            )
        return {"rope": rope.data_ptr(), "rotary_dim": rotary_dim}

    def attend(self, layer: int, query: Tensor, out: Tensor, plan: AttentionPlan) -> None:
        """Attention of the plan's rows, generated tokens and prompts; `query`, `out`: [rows, num_heads, head_size]."""
        self._check_layer(layer)
        if not plan.num_rows:
            return
        self._check_rows("query", query, plan, self.num_heads)
        self._check_rows("out", out, plan, self.num_heads)
        values: dict[str, float] = {
            "query": query.data_ptr(),
            "out": out.data_ptr(),
            "block_tables": plan.at["block_tables"],
            "query_stride": query.stride()[0],
            "out_stride": out.stride()[0],
            "table_stride": plan.table_stride,
            "layer": layer,
            "window": self._windows[layer],
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "kv_scales": self._kv_scales_of(layer),
            "sinks": 0 if self._sinks is None else self._sinks.data_ptr() + 4 * layer * self.num_heads,
            **self._fields,
        }
        launch_attention(
            self._launcher,
            self.variant,
            plan,
            values,
            split=SPLIT_RULE.splits(self._windows[layer]),
            wgmma=self._wgmma_prefill,
        )

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copies whole blocks: `pairs` is int32 [n, 2] on the device, source and destination.

        The caller has checked the ids; no block may be a destination and part of another pair.
        """
        if dtype_name(pairs) != "int32" or len(pairs.shape) != 2 or pairs.shape[1] != 2:
            raise ValueError(f"pairs: must be int32 [n, 2], got {dtype_name(pairs)} {tuple(pairs.shape)}")
        if not pairs.shape[0]:
            return
        block_bytes = int(self._fields["block_stride"]) * self.variant.kv_element_bytes
        self._launcher.launch(
            "pagekv_block_copy",
            self.variant,
            launch_config.block_copy(int(pairs.shape[0]), block_bytes),
            fill(BLOCK_COPY, pool=self._fields["pool"], pairs=pairs.data_ptr(), block_bytes=block_bytes),
        )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer: must be in [0, {self.num_layers}), got {layer}")

    def _check_rows(self, name: str, tensor: Tensor, plan: AttentionPlan, heads: int) -> None:
        """Refuses rows whose heads are not side by side; rows may be apart (a slice of a fused projection)."""
        shape = (plan.num_rows, heads, self.variant.head_size)
        if tuple(tensor.shape) != shape or dtype_name(tensor) != self.variant.dtype:
            raise ValueError(
                f"{name}: must be {self.variant.dtype} {shape}, got {dtype_name(tensor)} {tuple(tensor.shape)}"
            )
        stride = tuple(tensor.stride())
        bytes_apart = stride[0] * self.variant.element_bytes
        if stride[1:] != (self.variant.head_size, 1) or tensor.data_ptr() % 16 or bytes_apart % 16:
            raise ValueError(
                f"{name}: heads must be side by side and rows at multiples of 16 bytes, got strides {stride}"
            )
