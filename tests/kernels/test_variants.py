"""Kernel variants: combinations that exist, and the macros that each kernel depends on."""

from __future__ import annotations

import re

import pytest

from pagekv.kernels import sources
from pagekv.kernels.sources import SOURCES
from pagekv.kernels.variants import (
    DTYPE_PAIRS,
    EVERYWHERE,
    KERNELS,
    UnsupportedVariant,
    Variant,
    all_variants,
    check_wgmma,
)

PRESENT = [name for name, kernel in KERNELS.items() if (SOURCES / kernel.source).is_file()]
PLAIN = Variant("float16", "float16", 128)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (("float64", "float64", 64), "dtype: must be one of float32, float16, bfloat16"),
        (("float16", "bfloat16", 64), "kv_dtype: must be one of float16, float8_e4m3fn with dtype float16"),
        (("float32", "float8_e4m3fn", 64), "kv_dtype: must be one of float32 with"),
        (("float16", "float16", 112), "head_size: must be one of 64, 80, 96, 128, 256"),
    ],
)
def test_an_unsupported_combination_is_refused_by_name(values: tuple[str, str, int], field: str) -> None:
    with pytest.raises(UnsupportedVariant, match=field):
        Variant(*values)


def test_every_variant_is_listed_once() -> None:
    variants = all_variants()
    assert len(set(variants)) == len(variants) == sum(map(len, DTYPE_PAIRS.values())) * 5 * 2


def test_products_of_warpgroups_are_for_16_bit_types_and_heads_of_64_and_128() -> None:
    for variant in all_variants():
        allowed = variant.dtype == variant.kv_dtype != "float32" and variant.head_size in (64, 128)
        assert KERNELS["pagekv_prefill_wgmma"].serves(variant) == allowed
        if not allowed:
            with pytest.raises(UnsupportedVariant, match=r"needs float16 or bfloat16.*64 or 128, got"):
                check_wgmma(variant)
    assert "pagekv_prefill_wgmma" not in EVERYWHERE


@pytest.mark.parametrize("name", PRESENT)
def test_labels_tell_apart_what_macros_tell_apart(name: str) -> None:
    # A budget is found by its label: two different texts must never share one.
    kernel = KERNELS[name]
    labels = {tuple(kernel.macros_of(variant).items()): kernel.label(variant) for variant in all_variants()}
    assert len(set(labels.values())) == len(labels)


@pytest.mark.parametrize("name", PRESENT)
def test_a_kernel_depends_on_no_macro_it_does_not_list(name: str) -> None:
    # Else the gate would skip machine code that differs.
    text = re.sub(r"//[^\n]*", "", sources.read(KERNELS[name].source))
    unlisted = set(PLAIN.macros()) - set(KERNELS[name].macros)
    assert [macro for macro in unlisted if macro in text] == []
