"""The CPU emulation of what sm_90a alone has: products of a warpgroup against plain ones, barriers, and what it must
notice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.kernels.host_build import HostKernelError, HostLauncher, address

from pagekv.kernels.sources import translation_unit

FORWARD, REVERSED = HostLauncher(), HostLauncher(reversed_order=True)
Array = npt.NDArray[Any]

PARAMS = np.dtype([("a", "u8"), ("b", "u8"), ("out", "u8"), ("which", "i4")], align=True)
# Shared memory: a in 8 KiB a panel, b in 16 KiB a panel from 16 KiB on, barriers from 48 KiB on.
HEAD = (
    translation_unit("types.cuh")
    + translation_unit("ptx_sm90a.cuh")
    + """
struct Params { const u8* a; const u8* b; float* out; i32 which; };
template <typename T, int N> __device__ void put(float* out, const float (&d)[N][4]) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = 2 * (lane % 4);
    for (u32 n = 0; n < N; ++n)
        for (u32 i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 * N + 8 * n + column + i % 2] = d[n][i];
}
extern "C" __global__ void probe(const Params p) {
    PAGEKV_SWIZZLED_SHARED(shared);
    const u32 thread = threadIdx.x, lane = thread % 32;
    u8* const b = shared + (16 << 10);
    u64* const barriers = (u64*)(shared + (48 << 10));
    (void)lane; (void)b; (void)barriers;
    for (u32 i = thread; p.a != nullptr && i < 1024; i += blockDim.x) cp_async_16(shared + 16 * i, p.a + 16 * i);
    for (u32 i = thread; p.b != nullptr && i < 2048; i += blockDim.x) cp_async_16(b + 16 * i, p.b + 16 * i);
    cp_async_commit();
    cp_async_wait<0>();
    proxy_fence();
    if (thread == 0) mbarrier_init(barriers, 128), mbarrier_init(barriers + 1, 128), mbarrier_init_fence();
    __syncthreads();
"""
)


def probe(
    body: str,
    out: Array,
    a: Array | None = None,
    b: Array | None = None,
    *,
    which: int = 0,
    threads: int = 128,
    launcher: HostLauncher = FORWARD,
) -> Array:
    """Runs a kernel with this body, on one warpgroup or more; returns `out`, which it wrote."""
    params = np.array((address(a), address(b), address(out), which), PARAMS)
    launcher.run_text("probe", HEAD + body + "\n}\n", (), (1, 1, 1), threads, 49 << 10, params)
    return out


def halves(dtype: torch.dtype, *shape: int) -> tuple[Array, Array]:
    """Random 16-bit elements: their bits, and their values in double."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return values.view(torch.int16).numpy().copy(), values.double().numpy()


def swizzled(rows: Array) -> Array:
    """[n, 64 * panels] elements as panels of 64: within a row, 16-byte chunk c is at c ^ (row % 8)."""
    count, width = rows.shape
    chunks = rows.reshape(count, width // 64, 8, 8).transpose(1, 0, 2, 3)  # panel, row, chunk, element
    out = np.empty_like(chunks)
    for row in range(count):
        for chunk in range(8):
            out[:, row, chunk ^ (row % 8)] = chunks[:, row, chunk]
    return np.ascontiguousarray(out)


SCORES = """
    float d[16][4];
    wgmma_fence();
    for (u32 step = 0; step < 8; ++step) {
        const u64 rows = swizzled_operand(shared + step / 4 * 8192 + step % 4 * 32, 0, 1024);
        const u64 columns = swizzled_operand(b + step / 4 * 16384 + step % 4 * 32, 0, 1024);
        if (p.which) wgmma_m64n128k16<bf16>(d, rows, columns, step > 0);
        else wgmma_m64n128k16<f16>(d, rows, columns, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    put<float, 16>(p.out, d);
"""


@pytest.mark.parametrize("launcher", [FORWARD, REVERSED], ids=["forward", "reversed"])
def test_a_warpgroup_multiplies_rows_by_rows(launcher: HostLauncher) -> None:
    """64 x 128 dot products of 128 elements, both operands in panels in shared memory."""
    for is_bf16, dtype in enumerate((torch.float16, torch.bfloat16)):
        bits, exact = halves(dtype, 192, 128)
        parts = swizzled(bits[:64]), swizzled(bits[64:])
        out = probe(SCORES, np.zeros((64, 128), np.float32), *parts, which=is_bf16, launcher=launcher)
        np.testing.assert_allclose(out, exact[:64] @ exact[64:].T, rtol=1e-4, atol=1e-4)


VALUES = """
    float d[WIDTH / 8][4];
    u32 a[8][4];
    const u16* const rows = (const u16*)p.a;  // [64][128]
    for (u32 k = 0; k < 8; ++k)
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = thread / 32 * 16 + lane / 4 + i % 2 * 8, column = 16 * k + 2 * (lane % 4) + i / 2 * 8;
            a[k][i] = rows[row * 128 + column] | (u32)rows[row * 128 + column + 1] << 16;
        }
    for (u32 n = 0; n < WIDTH / 8; ++n) for (u32 i = 0; i < 4; ++i) d[n][i] = 1.0f;
    wgmma_fence();
    for (u32 k = 0; k < 8; ++k) {
        const u64 sixteen = swizzled_operand(b + k * 2048, 16384, 1024);
        if (p.which) wgmma_m64k16<bf16>(d, a[k], sixteen);
        else wgmma_m64k16<f16>(d, a[k], sixteen);
    }
    wgmma_commit();
    wgmma_wait<0>();
    put<float, WIDTH / 8>(p.out, d);
"""


@pytest.mark.parametrize("width", [64, 128])
def test_a_warpgroup_multiplies_registers_by_columns(width: int) -> None:
    """64 x 128 weights in registers, 128 rows of `width` elements in panels in shared memory, added to ones."""
    for is_bf16, dtype in enumerate((torch.float16, torch.bfloat16)):
        (a_bits, a), (b_bits, b) = halves(dtype, 64, 128), halves(dtype, 128, 128)
        out = np.zeros((64, width), np.float32)
        probe(VALUES.replace("WIDTH", str(width)), out, a_bits, swizzled(b_bits), which=is_bf16)
        np.testing.assert_allclose(out, a @ b[:, :width] + 1, rtol=1e-4, atol=1e-4)


def test_results_are_nan_before_the_wait_for_their_group() -> None:
    body = """
    float first[16][4] = {}, second[16][4] = {};
    const u64 ones = swizzled_operand(shared, 0, 1024);
    wgmma_fence();
    wgmma_m64n128k16<f16>(first, ones, swizzled_operand(b, 0, 1024), false);
    wgmma_commit();
    wgmma_m64n128k16<f16>(second, ones, swizzled_operand(b, 0, 1024), false);
    wgmma_commit();
    p.out[thread] = first[0][0];
    wgmma_wait<1>();
    p.out[128 + thread] = first[0][0];
    p.out[256 + thread] = second[0][0];
    wgmma_wait<0>();
    p.out[384 + thread] = second[0][0];
    """
    ones = np.full(16 << 10, 0x3C00, np.int16)
    out = probe(body, np.zeros((4, 128), np.float32), ones, ones)
    assert np.isnan(out[[0, 2]]).all()
    np.testing.assert_array_equal(out[[1, 3]], 16)


def test_operands_are_read_as_late_as_the_wait() -> None:
    """The first warpgroup releases its operands before the wait, and the second one overwrites them."""
    body = """
    if (thread >= 128) {
        mbarrier_wait(barriers, 0);
        if (thread == 128) for (u32 i = 0; i < 32 << 10; ++i) b[i] = 0;
        return;
    }
    float d[16][4];
    wgmma_fence();
    wgmma_m64n128k16<f16>(d, swizzled_operand(shared, 0, 1024), swizzled_operand(b, 0, 1024), false);
    wgmma_commit();
    if (p.which) mbarrier_arrive(barriers);
    wgmma_wait<0>();
    if (!p.which) mbarrier_arrive(barriers);
    p.out[thread] = d[0][0];
    """
    ones = np.full(16 << 10, 0x3C00, np.int16)
    for launcher in (FORWARD, REVERSED):
        for early, expected in ((0, 16.0), (1, 0.0)):
            out = np.zeros(128, np.float32)
            probe(body, out, ones, ones, which=early, threads=256, launcher=launcher)
            np.testing.assert_array_equal(out, expected)


def test_barriers_take_turns_by_parity() -> None:
    """Two warpgroups hand a number back and forth; before the first phase, one of parity 1 counts as ended."""
    body = """
    volatile float* const shared_number = (float*)shared;
    for (u32 round = 0; round < 5; ++round) {
        if (thread < 128) {
            mbarrier_wait(barriers + 1, round % 2 ^ 1);
            if (thread == 0) *shared_number = (float)round;
            mbarrier_arrive(barriers);
        } else {
            mbarrier_wait(barriers, round % 2);
            if (thread == 128) p.out[round] = *shared_number;
            mbarrier_arrive(barriers + 1);
        }
    }
    """
    for launcher in (FORWARD, REVERSED):
        out = probe(body, np.zeros(5, np.float32), threads=256, launcher=launcher)
        np.testing.assert_array_equal(out, np.arange(5))


START = "float d[16][4]; const u64 at = swizzled_operand(b, 0, 1024); wgmma_fence();"
PRODUCT = "wgmma_m64n128k16<f16>(d, at, at, false); wgmma_commit();"
# Body of a kernel -> text of the message.
FAULTS = {
    "mbarrier_wait(barriers, 0);": "a wait that does not end",
    "if (thread < 64) mbarrier_wait(barriers, 0); else __syncthreads();": "a wait that does not end",
    "mbarrier_arrive(barriers + 2);": "not initialised",
    "mbarrier_arrive((u64*)(shared + 4));": "eight aligned bytes",
    "mbarrier_wait((u64*)p.out, 0);": "eight aligned bytes",
    "if (thread % 32 < 31) { " + START + PRODUCT + " }": "lanes of one mask",
    "if (thread < 32) { " + START + PRODUCT + " wgmma_wait<0>(); }": "all warps of a warpgroup",
    "float d[16][4]; const u64 at = swizzled_operand(b, 0, 1024);" + PRODUCT: "no wgmma.fence",
    START + PRODUCT + "wgmma_wait<0>();" + PRODUCT: "no wgmma.fence",
    START + PRODUCT + "d[3][1] = 1.0f; wgmma_wait<0>();": "written before the wait",
    START + "wgmma_m64n128k16<f16>(d, at, at & ~(3ull << 62), false);": "not emulated",
    START + "const u64 own = swizzled_operand(b + lane * 1024, 0, 1024); wgmma_m64n128k16<f16>(d, own, at, false);"
    "wgmma_commit(); wgmma_wait<0>();": "the same operands",
    START + "wgmma_m64n128k16<f16>(d, at, swizzled_operand(shared, 0, 65536), false);"
    "wgmma_commit(); wgmma_wait<0>();": "not in shared memory",
}
ANY_FAULT = "\n".join(f"if (p.which == {which}) {{ {body} }}" for which, body in enumerate(FAULTS))


@pytest.mark.parametrize("body", FAULTS)
def test_what_a_gpu_leaves_undefined_ends_the_launch(body: str) -> None:
    which = list(FAULTS).index(body)
    with pytest.raises(HostKernelError, match=FAULTS[body]):
        probe(ANY_FAULT, np.zeros(128, np.float32), which=which)
    # The next launch starts afresh.
    np.testing.assert_array_equal(probe(ANY_FAULT + "p.out[thread] = 2.0f;", np.zeros(128, np.float32), which=-1), 2)
