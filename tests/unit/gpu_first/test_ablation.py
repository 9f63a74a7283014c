"""The decode kernel without parts of its design, over the emulated kernels."""

from __future__ import annotations

import pytest
import torch
from gpu_first.ablation import ABLATIONS, Ablation, ablation_cases, ablation_row, without
from gpu_first.machine import FirstMachine
from support.kernels.bench_machine import HostMachine

from pagekv.kernels import decode_plan
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.speed import Paged, paged
from pagekv.kernels.bench.workload import AttentionCase, Heads

CASE = AttentionCase(Heads("GQA 2", 2, 1), 2, 1100)


def attended(machine: FirstMachine, arena: Arena) -> Paged:
    torch.manual_seed(0)
    batch = paged(machine, arena, CASE, num_layers=2)
    batch.attend(1)
    return batch


@pytest.mark.kernels
@pytest.mark.parametrize("part", ABLATIONS)
def test_without_a_part_the_kernel_computes_the_same(part: str) -> None:
    """To the bit, where the cuts of a sequence stay; the changed kernel really runs, and only meanwhile."""
    machine = HostMachine()
    arena = Arena(machine, machine.memory())
    whole = attended(machine, arena)
    assert whole.plan.num_partials == 2 * 5
    texts: list[bool] = []
    changed_text = Ablation.edit

    def seen(ablation: Ablation, text: str) -> str:
        texts.append(changed_text(ablation, text) != text)
        return changed_text(ablation, text)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ablation, "edit", seen)
        with without(part, machine) as changed:
            lacking = attended(changed, arena)
    if part == "longer_splits":
        assert lacking.plan.num_partials == 2 * 2
        torch.testing.assert_close(lacking.out, whole.out, atol=2e-2, rtol=2e-2)
    else:
        assert torch.equal(lacking.out, whole.out)
    assert any(texts) == bool(ABLATIONS[part].old)
    assert decode_plan.LONGER_SPLITS_BEYOND[0] == 4096


@pytest.mark.kernels
def test_a_row_has_every_part() -> None:
    machine = HostMachine()
    row = ablation_row(machine, Arena(machine, machine.memory()), AttentionCase(CASE.heads, 1, 300))
    assert {part: row[part] for part in ABLATIONS} == dict.fromkeys(ABLATIONS, 1)
    assert row["microseconds"] == 1000


def test_a_kernel_that_has_changed_is_noticed() -> None:
    ablation = ABLATIONS["copies_awaited"]
    assert ablation.edit("void pagekv_merge(") == "void pagekv_merge("
    with pytest.raises(ValueError, match="the decode kernel has no"):
        ablation.edit("void pagekv_decode(const DecodeParams p)")


def test_contexts_are_whole_numbers_of_long_splits() -> None:
    assert {case.context % 1024 for case in ablation_cases()} == {0}
