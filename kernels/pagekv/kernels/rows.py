"""Row-wise kernels of a decoder layer: add and RMSNorm, and gated activations. Imports neither CuPy nor torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from pagekv.kernels import launch_config
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import ADD_NORM, GATED, fill
from pagekv.kernels.tensors import Tensor, dtype_name
from pagekv.kernels.variants import Variant

ALIGN_BYTES = 16
"""Rows begin at multiples of so many bytes, and have a multiple of so many bytes."""


class Norm(Protocol):
    """`x / sqrt(mean(x * x) + eps) * weight`. The weight is float32 and contiguous: [size], or a shape that
    `PagedAttention.write` takes for queries and keys.
    """

    @property
    def weight(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class RowKernels:
    """The kernels for rows of one element type. Holds no state of a step."""

    def __init__(self, launcher: Launcher, variant: Variant) -> None:
        self._launcher, self._variant = launcher, variant
        self._element_bytes = variant.element_bytes

    def add_norm(
        self,
        stream: Tensor,
        added: Tensor | None = None,
        *,
        factor: float = 1.0,
        added_norm: Norm | None = None,
        norm: Norm | None = None,
        out: Tensor | None = None,
    ) -> None:
        """`stream += factor * added_norm(added)`, then `out = norm(stream)`; contiguous `[rows, size]`. A part that
        is None does nothing. Raises ValueError for rows that the kernel cannot read.
        """
        rows, size = map(int, stream.shape)
        tensors = [each for each in (stream, added, out) if each is not None]
        norms = [each for each in (added_norm, norm) if each is not None]
        for each in tensors:
            self._check("rows", each, (rows, size), (size, 1))
        if (norm is None) != (out is None) or any(tuple(each.weight.shape) != (size,) for each in norms):
            raise ValueError(f"norm: needs a weight of {size} elements and a place for what it gives")
        self._launcher.launch(
            "pagekv_add_norm",
            self._variant,
            launch_config.add_norm(rows, size * self._element_bytes),
            fill(
                ADD_NORM,
                stream=stream.data_ptr(),
                added=0 if added is None else added.data_ptr(),
                out=0 if out is None else out.data_ptr(),
                added_weight=0 if added_norm is None else added_norm.weight.data_ptr(),
                weight=0 if norm is None else norm.weight.data_ptr(),
                size=size,
                factor=factor,
                added_eps=0.0 if added_norm is None else added_norm.eps,
                eps=0.0 if norm is None else norm.eps,
            ),
        )

    def gated(self, gate_up: Tensor, out: Tensor, activation: str) -> None:
        """`out = activation(gate) * up`: `gate_up` `[rows, 2 * size]`, the gate first; `out` `[rows, size]`; both
        contiguous. `activation`: silu or gelu_tanh. Raises ValueError for rows that the kernel cannot read.
        """
        rows, size = map(int, out.shape)
        self._check("gate_up", gate_up, (rows, 2 * size), (2 * size, 1))
        self._check("out", out, (rows, size), (size, 1))
        if activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation: must be silu or gelu_tanh, got {activation!r}")
        self._launcher.launch(
            "pagekv_gated",
            self._variant,
            launch_config.gated(rows, size * self._element_bytes),
            fill(GATED, gate_up=gate_up.data_ptr(), out=out.data_ptr(), size=size, gelu=int(activation == "gelu_tanh")),
        )

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        given, dtype = tuple(tensor.stride()), dtype_name(tensor)
        # Cached, because a step checks hundreds of tensors, of few shapes.
        fits = _fits(self._element_bytes, tuple(tensor.shape), given, shape, stride)
        if dtype != self._variant.dtype or tensor.data_ptr() % ALIGN_BYTES or not fits:
            raise ValueError(
                f"{name}: must be {self._variant.dtype} {shape} of rows at multiples of {ALIGN_BYTES} bytes, got "
                f"{dtype} {tuple(tensor.shape)} with strides {given}"
            )


@lru_cache(maxsize=4096)
def _fits(
    element_bytes: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    wanted_shape: tuple[int, ...],
    wanted_stride: tuple[int, ...],
) -> bool:
    """Whether a tensor of this shape and stride is as wanted, in rows of whole 16 bytes."""
    if shape != wanted_shape or any(n * element_bytes % ALIGN_BYTES for n in (wanted_stride[0], wanted_shape[-1])):
        return False
    # torch gives any stride to a dimension of one.
    return all(one == 1 or have == want for one, have, want in zip(shape, stride, wanted_stride, strict=True))
