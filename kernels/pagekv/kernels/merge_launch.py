"""The launch that merges what a layer's splits left, of decodes and prompts at once."""

from __future__ import annotations

from collections.abc import Mapping

from pagekv.kernels import launch_config
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import MERGE, fill
from pagekv.kernels.variants import Variant


def launch_merge(
    launcher: Launcher,
    variant: Variant,
    plan: AttentionPlan,
    values: Mapping[str, float],
    *,
    num_heads: int,
    split: bool,
) -> None:
    """Enqueues the merge of the plan's partial results, if the layer has any that no other kernel merges. `values`:
    `out`, `out_stride` and `sinks` of `MergeParams` at least. `split`: rows of prompts left partial results.

    Decodes in a step with split prompts are merged by the kernel for prompts; either gives the same bits.
    """
    if split and plan.num_split_items:
        kernel, items = "pagekv_merge_rows", "row_merges"
        config = launch_config.merge_rows(variant, plan.num_rows, num_heads)
    elif plan.num_merge_items and not plan.fused_merges:
        kernel, items = "pagekv_merge", "merge_items"
        config = launch_config.merge(variant, plan.num_merge_items, num_heads)
    else:
        return
    partial_out, partial_state = plan.partials(num_heads, variant.head_size)
    launcher.launch(
        kernel,
        variant,
        config,
        fill(
            MERGE,
            out=values["out"],
            partial_out=partial_out,
            partial_state=partial_state,
            sinks=values["sinks"],
            items=plan.at[items],
            out_stride=values["out_stride"],
            num_heads=num_heads,
        ),
    )
