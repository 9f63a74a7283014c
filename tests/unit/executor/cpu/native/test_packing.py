"""Weights in panels, against torch's own copy of dimensions that change places."""

from __future__ import annotations

import pytest
import torch

from pagekv.executor.cpu.native.packing import packed
from pagekv.executor.cpu.native.vectors import vector_lanes

pytestmark = pytest.mark.skipif(not vector_lanes(), reason="this processor has no vectors that the loops know")


def plain(weight: torch.Tensor, parts: int, wide: int, depth: int, paired: int, run: int) -> torch.Tensor:
    columns = len(weight) // parts
    panels = -(-columns // wide)
    padding = (0, depth * paired - weight.shape[1], 0, panels * wide - columns)
    whole = torch.nn.functional.pad(weight.reshape(parts, columns, -1), padding)
    pieces = whole.view(parts, panels, wide // (run or wide), run or wide, depth, paired)
    ordered = pieces.permute(1, 0, 2, 4, 3, 5) if run else pieces.permute(1, 4, 0, 2, 3, 5)
    return ordered.reshape(panels, -1)


@pytest.mark.parametrize(("dtype", "paired"), [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("wide", "run"), [(16, 0), (32, 0), (32, 16)])
@pytest.mark.parametrize("columns", [1, 16, 37, 64])
@pytest.mark.parametrize("inner", [1, 7, 16, 100])
def test_every_number_is_where_torch_puts_it(
    dtype: torch.dtype, paired: int, parts: int, wide: int, run: int, columns: int, inner: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(parts * columns, inner).to(dtype)
    given = weight, parts, wide, -(-inner // paired), paired, run
    assert torch.equal(packed(*given), plain(*given))


def test_weights_that_lie_apart_or_at_an_odd_address() -> None:
    torch.manual_seed(0)
    apart = torch.randn(40, 24).to(torch.bfloat16)[::2]
    odd = torch.randn(20 * 24 + 1).to(torch.bfloat16)[1:].view(20, 24)
    for weight in (apart, odd):
        assert torch.equal(packed(weight, 1, 16, 12, 2), plain(weight, 1, 16, 12, 2, 0))
        assert packed(weight, 1, 16, 12, 2).data_ptr() % 64 == 0


def test_numbers_that_do_not_make_four_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 numbers of torch\.bfloat16 have not 4 bytes"):
        packed(torch.ones(4, 4, dtype=torch.bfloat16), 1, 16, 4, 1)
