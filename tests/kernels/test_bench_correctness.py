"""The bench's checks of the kernels: they reach everything that is timed, and pass on the emulated kernels."""

from __future__ import annotations

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import correctness
from pagekv.kernels.bench.correctness import (
    CHUNK,
    Check,
    checks,
    crowd,
    setups,
    variants_to_check,
    write_checks,
)
from pagekv.kernels.bench.scene import Scene, Setup
from pagekv.kernels.decode_plan import LEAST_SPLIT, MOST_FUSED_PARTIALS, most_partials
from pagekv.kernels.prefill_splits import SPLIT_RULE
from pagekv.kernels.variants import DTYPE_PAIRS, HEAD_SIZES, Variant

HALF = Variant("float16", "float16", 64)


def test_correctness_covers_every_type_pair_and_head_size() -> None:
    variants = variants_to_check()
    pairs = {(dtype, kv_dtype) for dtype, kv_dtypes in DTYPE_PAIRS.items() for kv_dtype in kv_dtypes}
    assert {(v.dtype, v.kv_dtype) for v in variants} == pairs
    assert {v.head_size for v in variants} == set(HEAD_SIZES)
    assert any(v.features for v in variants)


def test_setups_reach_what_is_timed() -> None:
    """Groups, block sizes, contexts for the merge kernel, more work than a launch has blocks, subnormals."""
    found = setups()
    assert {s.num_heads // s.num_kv_heads for s in found} >= {1, 4, 8, 32, 64}
    assert {s.block_size for s in found} == {1, 16, 256}
    assert any(most_partials(max(s.lengths)) > MOST_FUSED_PARTIALS for s in found)
    assert any(max(s.lengths) - CHUNK >= SPLIT_RULE.most_whole for s in found if not s.decodes_only)
    assert any(sum(-(-n // LEAST_SPLIT) for n in s.lengths) * s.num_kv_heads > correctness.MANY_BLOCKS for s in found)
    assert {s.variant.dtype for s in found if s.subnormal} == {"bfloat16", "float16"}
    assert len({str(s) for s in found}) == len(found)


def test_the_pool_is_compared_where_torch_cannot_put_fp8_together(
    machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.cat

    def cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        if tensors[0].dtype == torch.float8_e4m3fn:
            raise NotImplementedError("\"cat_cuda\" not implemented for 'Float8_e4m3fn'")
        return real(tensors, dim)

    monkeypatch.setattr(torch, "cat", cat)
    (check,) = write_checks(Scene(machine, Setup(Variant("bfloat16", "float8_e4m3fn", 64), (1, 5))))
    assert check.passed


@pytest.mark.parametrize(
    ("setup", "count"),
    [
        (Setup(HALF, (1, 17, 40)), 8),
        (Setup(HALF, (1, 17, 40), num_heads=8, num_kv_heads=1, block_size=1), 8),
        (Setup(Variant("bfloat16", "float8_e4m3fn", 64), (1, 40), subnormal=True), 8),
        (Setup(HALF, (3, 300, 5), decodes_only=True), 6),
    ],
    ids=str,
)
def test_every_check_passes_on_the_emulated_kernels(machine: HostMachine, setup: Setup, count: int) -> None:
    found = list(checks(machine, setup))
    assert [check.name for check in found if not check.passed] == []
    assert len(found) == count


def test_the_end_of_a_prompt_that_is_too_long_for_a_reference_is_checked(
    machine: HostMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "MOST_PREFILL", 40)
    found = list(checks(machine, Setup(HALF, (40, 150))))
    assert all(check.passed for check in found)
    assert any(check.name.endswith("prefill behind 50 tokens") for check in found)
    assert any(check.name.endswith("prefill behind 50 tokens does not depend on chunks") for check in found)
    apart = "prefill behind 50 tokens and a decode do not depend on each other"
    assert any(check.name.endswith(apart) for check in found)


def test_a_crowd_has_several_items_for_each_thread_block(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "MANY_BLOCKS", 16)
    setup = crowd(HALF, most_context=30)
    assert len(setup.lengths) * setup.num_kv_heads > 16
    assert all(check.passed for check in checks(machine, setup))


def test_nan_is_no_pass() -> None:
    assert Check("x", float("nan"), 1.0).passed is False
