"""The CPU emulation of a GPU: layouts, and the faults of kernels that the emulation must notice."""

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

PARAMS = np.dtype([("a", "u8"), ("b", "u8"), ("out", "u8"), ("count", "i4"), ("which", "i4")], align=True)
HEAD = translation_unit("types.cuh") + (
    "struct Params { const void* a; const void* b; void* out; i32 count; i32 which; };\n"
    'extern "C" __global__ void probe(const Params p) {\n'
    "    PAGEKV_DYNAMIC_SHARED(shared);\n"
    "    const u32 thread = threadIdx.x;\n"
    "    float* const out = static_cast<float*>(p.out);\n"
    "    float* const sums = reinterpret_cast<float*>(shared);\n"
    "    (void)thread; (void)out; (void)sums;\n"
)


def probe(
    body: str,
    out: Array,
    a: Array | None = None,
    b: Array | None = None,
    *,
    threads: int = 32,
    grid: int = 1,
    which: int = 0,
    shared_bytes: int = 4096,
    launcher: HostLauncher = FORWARD,
    macros: tuple[str, ...] = (),
) -> Array:
    """Runs a kernel with this body; returns `out`, which it wrote."""
    params = np.array((address(a), address(b), address(out), out.size, which), PARAMS)
    launcher.run_text("probe", HEAD + body + "\n}\n", macros, (grid, 1, 1), threads, shared_bytes, params)
    return out


def halves(dtype: torch.dtype, *shape: int) -> tuple[Array, Array]:
    """Random 16-bit elements: their bits, and their values in double."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return values.view(torch.int16).numpy().copy(), values.double().numpy()


LOAD_TILES = """
    // Shared memory: a [16][16] row by row, b [16][8] row by row.
    for (u32 i = thread; i < 32; i += 32) cp_async_16(shared + 16 * i, static_cast<const u8*>(p.a) + 16 * i);
    if (thread < 16) cp_async_16(shared + 512 + 16 * thread, static_cast<const u8*>(p.b) + 16 * thread);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    u32 a[4], b[4];
"""
USE_LDMATRIX = """
    // Matrices in the order of the fragment: rows 0..7 and 8..15 of columns 0..7, then of columns 8..15.
    ldmatrix_x4(a, shared + (thread % 16) * 32 + (thread / 16) * 16);
    ldmatrix_x4_trans(b, shared + 512 + (thread % 16) * 16);
"""
USE_LAYOUT = """
    // The layout that the PTX manual draws, element by element.
    const u32 g = thread / 4, t = 2 * (thread % 4);
    const u16* const rows = reinterpret_cast<const u16*>(shared);
    const u16* const columns = rows + 256;
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = g + 8 * (i % 2), column = t + 8 * (i / 2);
        a[i] = rows[row * 16 + column] | static_cast<u32>(rows[row * 16 + column + 1]) << 16;
    }
    for (u32 i = 0; i < 2; ++i)
        b[i] = columns[(t + 8 * i) * 8 + g] | static_cast<u32>(columns[(t + 8 * i + 1) * 8 + g]) << 16;
"""
MULTIPLY = """
    float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (p.which) mma_m16n8k16<bf16>(d, a, b[0], b[1]);
    else mma_m16n8k16<f16>(d, a, b[0], b[1]);
    for (u32 i = 0; i < 4; ++i) out[(thread / 4 + 8 * (i / 2)) * 8 + 2 * (thread % 4) + i % 2] = d[i];
"""


@pytest.mark.parametrize("fragments", [USE_LDMATRIX, USE_LAYOUT], ids=["ldmatrix", "by element"])
@pytest.mark.parametrize("launcher", [FORWARD, REVERSED], ids=["forward", "reversed"])
def test_matrix_instructions_multiply_matrices(fragments: str, launcher: HostLauncher) -> None:
    body = LOAD_TILES + fragments + MULTIPLY
    for is_bf16, dtype in enumerate((torch.float16, torch.bfloat16)):
        (a_bits, a), (b_bits, b) = halves(dtype, 16, 16), halves(dtype, 16, 8)
        out = probe(body, np.zeros((16, 8), np.float32), a_bits, b_bits, which=is_bf16, launcher=launcher)
        np.testing.assert_allclose(out, a @ b + 1, rtol=1e-5, atol=1e-5)


def test_16_bit_conversions_are_those_of_torch() -> None:
    """To nearest, ties to even, through subnormals and over the largest, for both types."""
    edges = np.array(
        [0.0, -0.0, 65504, 65519.99, 65520, 1e9, -np.inf, np.inf, 6e-8, 2.98e-8, 2.99e-8, 1e-40], np.float32
    )
    values = np.concatenate([edges, np.random.default_rng(1).normal(size=20000).astype(np.float32)])
    values = np.concatenate(
        [values, values[12:] * np.float32(1e-6), (values[12:].view(np.int32) & ~0xFFF).view(np.float32)]
    )
    body = """
    const float* const in = static_cast<const float*>(p.a);
    u32* const bits = static_cast<u32*>(p.out);
    for (i32 i = static_cast<i32>(thread); i < p.count; i += 32) {
        bits[i] = from_float<f16>(in[i]).bits | static_cast<u32>(from_float<bf16>(in[i]).bits) << 16;
        if (pack2<f16>(in[i], 1.0f) != (from_float<f16>(in[i]).bits | 0x3c000000u)) bits[i] = 0xdead;
    }"""
    bits = probe(body, np.zeros(values.size, np.uint32), values)
    source = torch.from_numpy(values)
    np.testing.assert_array_equal(bits & 0xFFFF, source.half().view(torch.int16).numpy().astype(np.uint16))
    np.testing.assert_array_equal(bits >> 16, source.bfloat16().view(torch.int16).numpy().astype(np.uint16))


def test_16_bit_elements_widen_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    body = """
    const u16* const in = static_cast<const u16*>(p.a);
    for (i32 i = static_cast<i32>(thread); i < p.count / 2; i += 32) {
        out[2 * i] = to_float(f16{in[i]});
        out[2 * i + 1] = to_float(bf16{in[i]});
    }"""
    out = probe(body, np.zeros((1 << 16, 2), np.float32), bits)
    for column, dtype in enumerate((torch.float16, torch.bfloat16)):
        expected = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
        np.testing.assert_array_equal(out[:, column], expected)


CONVERSIONS = pytest.mark.parametrize("macros", [(), ("-DPAGEKV_E4M3_CVT",)], ids=["integers", "hardware"])


@CONVERSIONS
def test_every_e4m3_widens_exactly(macros: tuple[str, ...]) -> None:
    """By value, and by fours into 16-bit pairs, whose factor is left out; NaN may become a number there."""
    bits = np.arange(256, dtype=np.uint8)
    body = """
    const u8* const in = static_cast<const u8*>(p.a);
    for (u32 i = thread; i < 64; i += 32) {
        u32 first, second;
        widen_e4m3x4<f16>(reinterpret_cast<const u32*>(in)[i], first, second);
        const u16 pairs[4] = {static_cast<u16>(first), static_cast<u16>(first >> 16), static_cast<u16>(second),
                              static_cast<u16>(second >> 16)};
        widen_e4m3x4<bf16>(reinterpret_cast<const u32*>(in)[i], first, second);
        const u16 bf16_pairs[4] = {static_cast<u16>(first), static_cast<u16>(first >> 16), static_cast<u16>(second),
                                   static_cast<u16>(second >> 16)};
        for (u32 k = 0; k < 4; ++k) {
            out[4 * i + k] = to_float(e4m3{in[4 * i + k]});
            out[256 + 4 * i + k] = to_float(f16{pairs[k]}) * E4m3Widening<f16>::scale;
            out[512 + 4 * i + k] = to_float(bf16{bf16_pairs[k]}) * E4m3Widening<bf16>::scale;
        }
    }"""
    out = probe(body, np.zeros((3, 256), np.float32), bits, macros=macros)
    expected = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(out[0], expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(out[1:, finite], np.stack([expected[finite]] * 2))
    assert np.isnan(out[1, ~finite]).all() if macros else np.isfinite(out[1]).all()
    assert np.isfinite(out[2]).all()


@CONVERSIONS
def test_floats_become_the_nearest_e4m3_and_saturate(macros: tuple[str, ...]) -> None:
    """Every midpoint between two neighbours and its neighbours in float, against torch (which has no saturation)."""
    values = np.sort(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy())
    middles = (values[1:] + values[:-1]) / 2
    inputs = np.concatenate(
        [values, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(448))]
    )
    inputs = np.concatenate([inputs, -inputs]).astype(np.float32)
    large = np.array([448, 449, 464, 465, 1e30, np.inf, -500, -np.inf, np.nan], np.float32)
    body = """
    const float* const in = static_cast<const float*>(p.a);
    u8* const bytes = static_cast<u8*>(p.out);
    for (i32 i = static_cast<i32>(thread); i < p.count; i += 32) bytes[i] = from_float<e4m3>(in[i]).bits;
    """
    bits = probe(body, np.zeros(inputs.size, np.uint8), inputs, macros=macros)
    np.testing.assert_array_equal(bits, torch.from_numpy(inputs).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    bits = probe(body, np.zeros(large.size, np.uint8), large, macros=macros)
    assert bits.tolist() == [0x7E] * 6 + [0xFE] * 2 + [0x7F]


def test_shuffles_move_what_they_name() -> None:
    body = """
    out[thread] = __shfl_xor_sync(kFullWarp, static_cast<float>(thread), 5);
    out[32 + thread] = __shfl_sync(kFullWarp, static_cast<float>(thread), 3, 8);
    out[64 + thread] = __shfl_down_sync(kFullWarp, static_cast<float>(thread), 4);
    out[96 + thread] = __shfl_up_sync(kFullWarp, static_cast<float>(thread), 4);
    out[128 + thread] = static_cast<float>(__ballot_sync(kFullWarp, thread % 2 == 0) & 0xfffu);
    """
    lanes = np.arange(32)
    out = probe(body, np.zeros((5, 32), np.float32), launcher=REVERSED)
    np.testing.assert_array_equal(out[0], lanes ^ 5)
    np.testing.assert_array_equal(out[1], lanes // 8 * 8 + 3)
    np.testing.assert_array_equal(out[2], np.where(lanes < 28, lanes + 4, lanes))
    np.testing.assert_array_equal(out[3], np.where(lanes < 4, lanes, lanes - 4))
    np.testing.assert_array_equal(out[4], 0x555)


def test_shared_memory_starts_as_nan_for_every_block() -> None:
    body = """
    __shared__ float fixed[32];
    out[blockIdx.x * 64 + thread] = sums[thread];
    out[blockIdx.x * 64 + 32 + thread] = fixed[thread];
    sums[thread] = fixed[thread] = 1.0f;
    """
    assert np.isnan(probe(body, np.zeros((3, 64), np.float32), grid=3)).all()


def test_asynchronous_copies_arrive_at_the_wait_for_their_group() -> None:
    body = """
    for (u32 i = 0; i < 3; ++i) {
        cp_async_16(shared + 512 * i + 16 * thread, static_cast<const u8*>(p.a) + 16 * thread, i < 2);
        cp_async_commit();
    }
    cp_async_wait<2>();
    for (u32 i = 0; i < 3; ++i) out[4 * thread + i] = sums[128 * i + 4 * thread];
    cp_async_wait<0>();
    out[4 * thread + 3] = sums[128 + 4 * thread] + sums[256 + 4 * thread];
    """
    source = np.arange(128, dtype=np.float32)
    out = probe(body, np.zeros((32, 4), np.float32), source)
    np.testing.assert_array_equal(out[:, 0], source[::4])
    assert np.isnan(out[:, 1:3]).all()
    np.testing.assert_array_equal(out[:, 3], source[::4], "the copy that was not valid brings zeros")


SUM_OF_NEIGHBOUR = """
    sums[thread] = static_cast<float>(thread);
    if (p.which) __syncthreads();
    out[thread] = sums[(thread + *static_cast<const u32*>(p.a)) % 64];
"""


def test_a_missing_barrier_shows_in_one_of_both_orders() -> None:
    for step in (1, 33, 63):
        expected = (np.arange(64) + step) % 64
        seen = []
        for launcher in (FORWARD, REVERSED):
            whole, broken = (
                probe(
                    SUM_OF_NEIGHBOUR,
                    np.zeros(64, np.float32),
                    np.array([step], np.uint32),
                    threads=64,
                    which=barrier,
                    launcher=launcher,
                )
                for barrier in (1, 0)
            )
            np.testing.assert_array_equal(whole, expected)
            seen.append(bool(np.isnan(broken).any()))
        assert any(seen)


# Body of a kernel -> text of the message.
FAULTS = {
    "if (thread < 40) __syncthreads();": "left the kernel",
    "if (thread < 32) __syncthreads(); else {\n __syncthreads(); }": "same barrier",
    "if (thread < 16) return; __syncthreads();": "left the kernel",
    "if (thread % 2) out[0] = __shfl_sync(kFullWarp, 1.0f, 0);": "lanes of one mask",
    "out[0] = __shfl_xor_sync(thread % 32 < 16 ? 0xffffu : 0xffff0000u, 1.0f, 16);": "outside mask",
    "out[0] = __shfl_sync(0xfffffffeu, 1.0f, 1);": "not in its own mask",
    "if (thread < 8) { __syncthreads(); } else { __syncwarp(); __syncthreads(); }": "lanes of one mask",
    "u32 r[4]; if (thread % 32 < 31) ldmatrix_x4(r, shared);": "lanes of one mask",
    "u32 r[4]; ldmatrix_x4(r, out);": "not in shared memory",
    "u32 r[4]; ldmatrix_x4(r, shared + 8);": "not aligned to 16 bytes",
    "cp_async_16(shared, static_cast<const u8*>(p.a) + 4);": "not aligned to 16 bytes",
    "cp_async_16(shared, static_cast<const u8*>(p.a) + 4, false);": "not aligned to 16 bytes",
    "cp_async_16(shared + 4096, p.a);": "not in shared memory",
    "out[0] = sums[1024 + thread];": "wrong address",
    "*reinterpret_cast<volatile float*>(thread) = 1.0f;": "undefined behaviour|wrong address",
    "*static_cast<Bytes16*>(p.out) = *reinterpret_cast<const Bytes16*>(static_cast<const u8*>(p.a) + 4);": "misaligned",
    "volatile i32 most = 0x7fffffff; most = most + 1;": "overflow",
    "volatile i32 count = p.count; out[0] = static_cast<float>(1 << (count + 40));": "shift",
    "volatile i32 zero = 0; out[0] = static_cast<float>(p.count / zero);": "division|undefined",
    "volatile i32 go = 1; while (go) {}": "takes too long",
}


# All of them in one text, because each text takes a second to compile.
ANY_FAULT = "\n".join(f"if (p.which == {which}) {{ {body} }}" for which, body in enumerate(FAULTS))


@pytest.mark.parametrize("body", FAULTS)
def test_what_a_gpu_leaves_undefined_ends_the_launch(body: str) -> None:
    zeros, which = np.zeros(256, np.float32), list(FAULTS).index(body)
    launcher = HostLauncher(seconds=1)
    with pytest.raises(HostKernelError, match=FAULTS[body]):
        probe(ANY_FAULT, np.zeros(64, np.float32), zeros, threads=64, which=which, launcher=launcher)
    # The next launch starts afresh.
    np.testing.assert_array_equal(probe(ANY_FAULT + "out[thread] = 2.0f;", np.zeros(32, np.float32), which=-1), 2)


def test_an_error_names_its_line() -> None:
    with pytest.raises(HostKernelError, match=r"probe.*body\.cu:3"):
        probe('\n#line 1 "body.cu"\n\n\n*reinterpret_cast<volatile float*>(thread) = 1.0f;', np.zeros(1, np.float32))


def test_a_structure_of_another_size_is_refused() -> None:
    with pytest.raises(HostKernelError, match="the structure has 32 bytes, was given 8"):
        FORWARD.run_text("probe", HEAD + "}\n", (), (1, 1, 1), 32, 0, np.array((1,), [("a", "u8")]))
