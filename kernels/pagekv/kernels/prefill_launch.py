"""The launch of a step's prompts in one layer."""

from __future__ import annotations

from collections.abc import Mapping

from pagekv.kernels import launch_config
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import PREFILL, fill
from pagekv.kernels.variants import Variant


def launch_prefill(
    launcher: Launcher,
    variant: Variant,
    plan: AttentionPlan,
    values: Mapping[str, float],
    *,
    num_heads: int,
    num_kv_heads: int,
    split: bool,
    wgmma: bool = False,
) -> None:
    """Enqueues the attention of the plan's prompts. `values`: the fields of `PrefillParams` but for items and partial
    results. `split`: rows of many keys are split, as the layer's window decides, and leave partial results.
    `wgmma`: by warpgroups, where the GPU and the variant allow it."""
    splits = split and plan.num_split_items > 0
    partial_out, partial_state = plan.partials(num_heads, variant.head_size)
    launcher.launch(
        "pagekv_prefill_wgmma" if wgmma else "pagekv_prefill",
        variant,
        launch_config.prefill(
            variant, plan.num_split_items if splits else plan.num_prefill_items, num_kv_heads, wgmma=wgmma
        ),
        fill(
            PREFILL,
            items=plan.at["split_items" if splits else "prefill_items"],
            merges=plan.at["row_merges"],
            partial_out=partial_out,
            partial_state=partial_state,
            **values,
        ),
    )
