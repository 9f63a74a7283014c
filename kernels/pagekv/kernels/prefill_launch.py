"""Launches of a step's prompts in one layer: rows whole, and in layers that split the rest of them in passes."""

from __future__ import annotations

from collections.abc import Mapping

from pagekv.kernels import launch_config
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import MERGE, PREFILL, PREFILL_SPLIT, fill
from pagekv.kernels.variants import Variant

ITEM_BYTES = 16
"""Of an item, and of a merge."""


def launch_prefill(
    launcher: Launcher,
    variant: Variant,
    plan: AttentionPlan,
    values: Mapping[str, float],
    *,
    num_heads: int,
    num_kv_heads: int,
    split: bool,
) -> None:
    """Enqueues the attention of the plan's prompts. `values`: the fields of `PrefillParams` but for the items. `split`:
    rows of many keys are split, as the layer's window decides."""
    first = plan.num_split_tiles if split else 0
    if count := plan.num_prefill_items - first:
        launcher.launch(
            "pagekv_prefill",
            variant,
            launch_config.prefill(variant, count, num_kv_heads),
            fill(PREFILL, items=plan.at["prefill_items"] + first * ITEM_BYTES, num_items=count, **values),
        )
    partial_out, partial_state = plan.partials(num_heads, variant.head_size)
    for each in plan.passes if split else ():
        launcher.launch(
            "pagekv_prefill_split",
            variant,
            launch_config.prefill(variant, each.num_items, num_kv_heads),
            fill(
                PREFILL_SPLIT,
                items=plan.at["split_items"] + each.first_item * ITEM_BYTES,
                num_items=each.num_items,
                merges=plan.at["row_merges"],
                partial_out=partial_out,
                partial_state=partial_state,
                **values,
            ),
        )
        launcher.launch(
            "pagekv_merge_rows",
            variant,
            launch_config.merge_rows(variant, each.num_rows, num_heads),
            fill(
                MERGE,
                out=values["out"],
                partial_out=partial_out,
                partial_state=partial_state,
                sinks=values["sinks"],
                items=plan.at["row_merges"] + each.first_row * ITEM_BYTES,
                out_stride=values["out_stride"],
                num_heads=num_heads,
            ),
        )
