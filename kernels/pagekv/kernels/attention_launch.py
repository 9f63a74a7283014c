"""The launches of a layer's attention: decodes, prompts, and the merge of their partial results."""

from __future__ import annotations

from collections.abc import Mapping

from pagekv.kernels import launch_config
from pagekv.kernels.attention_plan import AttentionPlan
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import DECODE, MERGE, PREFILL, fill
from pagekv.kernels.variants import Variant


def launch_attention(
    launcher: Launcher,
    variant: Variant,
    plan: AttentionPlan,
    values: Mapping[str, float],
    *,
    split: bool,
    wgmma: bool = False,
) -> None:
    """Enqueues the plan's work in one layer. `values`: the fields that the parameters of decode and prefill share,
    without those of partial results. `split`: whether the layer splits prompt rows that see many keys, which its window
    decides. `wgmma`: prompts use `pagekv_prefill_wgmma`, which the GPU and the variant must allow.

    In a step with split prompts, `pagekv_merge_rows` merges the partial results of prompts and of decodes, unless the
    decode kernels merge their own. `pagekv_merge` would give the same bits.
    """
    num_heads, num_kv_heads = int(values["num_heads"]), int(values["num_kv_heads"])
    partial_out, partial_state = plan.partials(num_heads, variant.head_size)
    partials: dict[str, float] = {"partial_out": partial_out, "partial_state": partial_state}
    for kernel, num_items, items in (
        ("pagekv_decode_wide", plan.num_wide_items, "wide_items"),
        ("pagekv_decode", plan.num_decode_items, "decode_items"),
    ):
        if not num_items:
            continue
        wide = kernel == "pagekv_decode_wide"
        config = launch_config.decode(variant, num_items, num_heads, num_kv_heads, wide=wide)
        params = fill(
            DECODE,
            items=plan.at[items],
            item_contexts=0 if wide else plan.at["item_contexts"],
            dealt=plan.at["dealt"] + 8 * wide,
            members=plan.at["members"] if wide else 0,
            merges=plan.at["merge_items"],
            merge_counters=plan.at["merge_counters"] if plan.fused_merges else 0,
            num_items=num_items,
            **partials,
            **values,
        )
        launcher.launch(kernel, variant, config, params)
    splits = split and plan.num_split_items > 0
    if plan.num_prefill_items:
        num_items, items = (
            (plan.num_split_items, "split_items") if splits else (plan.num_prefill_items, "prefill_items")
        )
        kernel = "pagekv_prefill_wgmma" if wgmma else "pagekv_prefill"
        config = launch_config.prefill(variant, num_items, num_kv_heads, wgmma=wgmma)
        params = fill(
            PREFILL,
            items=plan.at[items],
            merges=plan.at["row_merges"],
            query_start=plan.at["query_start"],
            context_lens=plan.at["context_lens"],
            **partials,
            **values,
        )
        launcher.launch(kernel, variant, config, params)
    if splits:
        kernel, items = "pagekv_merge_rows", "row_merges"
        config = launch_config.merge_rows(variant, plan.num_rows, num_heads)
    elif plan.num_merge_items and not plan.fused_merges:
        kernel, items = "pagekv_merge", "merge_items"
        config = launch_config.merge(variant, plan.num_merge_items, num_heads)
    else:
        return
    merged = {name: values[name] for name in ("out", "out_stride", "sinks", "num_heads")}
    launcher.launch(kernel, variant, config, fill(MERGE, items=plan.at[items], **partials, **merged))
