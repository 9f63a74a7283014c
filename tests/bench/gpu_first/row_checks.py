"""The row-wise kernels of a decoder layer against torch in float64, on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from support.kernels.plain_norm import PlainNorm

from gpu_first.machine import FirstMachine
from pagekv.kernels.bench.correctness import Check
from pagekv.kernels.rows import Norm, RowKernels
from pagekv.kernels.variants import Variant

# Relative to the largest value: a rounding to the type, and in float32 the sums.
ALLOWED = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def row_checks(machine: FirstMachine, variant: Variant, rows: int = 3, size: int = 4096) -> Iterator[Check]:
    """Add and RMSNorm of rows, and both gated activations, each waited for."""
    kernels, allowed = RowKernels(machine.launcher, variant), ALLOWED[variant.dtype]
    made = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(machine.device, getattr(torch, variant.dtype))

    def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Check:
        machine.synchronize()
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        return Check(f"{name} of {rows} x {actual.shape[-1]}", float(error), allowed)

    norm = PlainNorm(1 + random(size).float() / 4, 1e-5)
    stream, added = random(rows, size), random(rows, size)
    out, expected = torch.empty_like(stream), stream.double() + 0.5 * added.double()
    kernels.add_norm(stream, added, factor=0.5, norm=norm, out=out)
    yield check("sum", stream, expected)
    yield check("norm", out, _normed(stream, norm))
    gate_up = random(rows, 2 * size)
    gate, up = gate_up.double().chunk(2, dim=1)
    for activation, gated in (
        ("silu", torch.nn.functional.silu(gate)),
        ("gelu_tanh", torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        kernels.gated(gate_up, out, activation)
        yield check(activation, out, gated * up)


def _normed(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    exact = rows.double()
    return exact / (exact.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * weight.double()
