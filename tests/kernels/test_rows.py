"""`add_norm.cu` and `gated.cu` on the CPU, against float64: rows of every type, with every part missing once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.kernels.host_build import HostLauncher
from support.kernels.plain_norm import PlainNorm
from support.kernels.planted_faults import Fault, assert_noticed, visible

from pagekv.kernels import launch_config
from pagekv.kernels.rows import Norm, RowKernels
from pagekv.kernels.variants import Variant

Float64 = npt.NDArray[np.float64]
DTYPES = ["float32", "float16", "bfloat16"]
# Differences that float32 arithmetic and one rounding may make, relative.
STEP = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def kernels(launcher: HostLauncher, dtype: str) -> RowKernels:
    return RowKernels(launcher, Variant(dtype, dtype, 64))


def random_rows(seed: int, dtype: str, *shape: int) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(getattr(torch, dtype))


def random_norm(seed: int, *shape: int) -> Norm:
    return PlainNorm(1 + 0.3 * random_rows(seed, "float32", *shape), 1e-3)


def exact(tensor: torch.Tensor) -> Float64:
    values: Float64 = tensor.double().numpy().copy()
    return values


def normed(rows: Float64, norm: Norm | None) -> Float64:
    if norm is None:
        return rows
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    root: Float64 = np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + norm.eps)
    return rows / root * exact(weight)


def assert_close(actual: torch.Tensor, expected: Float64, dtype: str) -> None:
    # The absolute part is for sums of opposite signs, of values up to about 20.
    np.testing.assert_allclose(exact(actual), expected, rtol=STEP[dtype], atol=1e-5)


def check_add_norm(
    launcher: HostLauncher, dtype: str, size: int, *, added: bool = True, after: bool = False, before: bool = True
) -> None:
    """The sum is compared with the twin's, and what is normed with the twin's of the sum as it was stored."""
    stream, more = random_rows(1, dtype, 3, size), random_rows(2, dtype, 3, size)
    out = torch.full_like(stream, float("nan"))
    added_norm, norm = random_norm(3, size) if after else None, random_norm(4, size) if before else None
    wanted = exact(stream) + (0.7 * normed(exact(more), added_norm) if added else 0.0)
    kernels(launcher, dtype).add_norm(
        stream,
        more if added else None,
        factor=0.7,
        added_norm=added_norm,
        norm=norm,
        out=out if before else None,
    )
    if added:
        assert_close(stream, wanted, dtype)
    else:
        np.testing.assert_array_equal(exact(stream), wanted)
    if before:
        assert_close(out, normed(exact(stream), norm), dtype)
    else:
        assert out.isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(launcher: HostLauncher, dtype: str) -> None:
    """More elements than a thread block has in one pass, and a last pass of a few threads."""
    check_add_norm(launcher, dtype, 4104)


@pytest.mark.parametrize(("added", "after", "before"), [(False, False, True), (True, True, True), (True, True, False)])
def test_parts_of_add_norm_may_be_missing(launcher: HostLauncher, added: bool, after: bool, before: bool) -> None:
    check_add_norm(launcher, "bfloat16", 328, added=added, after=after, before=before)


def check_gated(launcher: HostLauncher, dtype: str, activation: str, size: int = 200) -> None:
    gate_up = random_rows(7, dtype, 3, 2 * size)
    # Both ends: nothing is left of the gate, and all of it.
    gate_up[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -0.0])
    out = torch.full((3, size), float("nan"), dtype=gate_up.dtype)
    kernels(launcher, dtype).gated(gate_up, out, activation)
    gate, up = np.split(exact(gate_up), 2, axis=1)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    wanted = gate / (1 + np.exp(-gate)) if activation == "silu" else 0.5 * gate * (1 + tanh)
    assert_close(out, wanted * up, dtype)


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(launcher: HostLauncher, dtype: str, activation: str) -> None:
    check_gated(launcher, dtype, activation)


def test_rows_of_several_thread_blocks_are_gated(launcher: HostLauncher) -> None:
    check_gated(launcher, "bfloat16", "silu", 2056)


def test_rows_do_not_depend_on_the_batch(launcher: HostLauncher) -> None:
    whole, alone = random_rows(8, "bfloat16", 5, 72), random_rows(8, "bfloat16", 5, 72)[3:4].clone()
    norm, outs = (
        random_norm(9, 72),
        (torch.empty(5, 72, dtype=torch.bfloat16), torch.empty(1, 72, dtype=torch.bfloat16)),
    )
    for stream, out in zip((whole, alone), outs, strict=True):
        kernels(launcher, "bfloat16").add_norm(stream, norm=norm, out=out)
    assert torch.equal(outs[0][3], outs[1][0])


def test_rows_that_no_kernel_reads_are_refused() -> None:
    made, norm = kernels(HostLauncher(), "bfloat16"), random_norm(1, 72)
    rows = random_rows(1, "bfloat16", 3, 80)
    with pytest.raises(ValueError, match=r"rows: must be bfloat16 \(3, 72\) of rows at multiples of 16 bytes"):
        made.add_norm(rows[:, :72], norm=norm, out=torch.empty(3, 72, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="norm: needs a weight of 80 elements"):
        made.add_norm(rows, norm=norm, out=torch.empty_like(rows))
    with pytest.raises(ValueError, match="gate_up: must be bfloat16"):
        made.gated(rows.float(), torch.empty(3, 40, dtype=torch.bfloat16), "silu")
    with pytest.raises(ValueError, match="activation: must be silu or gelu_tanh, got 'relu'"):
        made.gated(rows, torch.empty(3, 40, dtype=torch.bfloat16), "relu")


def test_a_row_has_a_thread_block_and_a_gated_row_one_for_4096_dims() -> None:
    assert launch_config.add_norm(7, 8192) == launch_config.LaunchConfig((7, 1, 1), 256, 0)
    assert launch_config.add_norm(7, 160) == launch_config.LaunchConfig((7, 1, 1), 32, 0)
    assert launch_config.gated(7, 4112).grid == (7, 2, 1)


def check_norm(launcher: HostLauncher) -> None:
    check_add_norm(launcher, "bfloat16", 4104, after=True)


def check_silu(launcher: HostLauncher) -> None:
    check_gated(launcher, "bfloat16", "silu")


def check_gelu(launcher: HostLauncher) -> None:
    check_gated(launcher, "float32", "gelu_tanh")


ADD_NORM, GATED = "pagekv_add_norm", "pagekv_gated"
FAULTS = [
    Fault("no barrier before a sum is read", ADD_NORM, "= sum;\n    __syncthreads();", "= sum;", check_norm),
    Fault("no barrier behind an earlier sum", ADD_NORM, "__syncthreads();  // an earlier", "//", check_norm),
    Fault("lanes left out", ADD_NORM, "lane = 16;", "lane = 8;", check_norm),
    Fault("a warp left out", ADD_NORM, "blockDim.x) / 32; ++warp", "blockDim.x) / 32 - 1; ++warp", check_norm),
    Fault("no factor", ADD_NORM, "scale = p.factor;", "scale = 1.0f;", check_norm),
    Fault("the other epsilon", ADD_NORM, "+ p.added_eps", "+ 100.0f", check_norm),
    Fault("no epsilon", ADD_NORM, "+ p.eps", "+ 1.0f", check_norm),
    Fault("the first row again", ADD_NORM, "(p.stream) + row * p.size", "(p.stream)", check_norm),
    Fault(
        "gate and gated exchanged",
        GATED,
        "gate = gates[chunk], up = gates[chunks + chunk]",
        "up = gates[chunk], gate = gates[chunks + chunk]",
        check_silu,
    ),
    Fault("one chunk too many", GATED, "chunk >= chunks", "chunk > chunks", check_silu, sanitizer=True),
    Fault("SiLU for GELU", GATED, "p.gelu ?", "!p.gelu ?", check_silu),
    Fault("no cube", GATED, "kInner = 0.044715f", "kInner = 0.0f", check_gelu),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
