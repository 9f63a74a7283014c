"""The vector and matrix instructions that the CPU backend computes with."""

from __future__ import annotations

import torch


def instruction_set(dtype: torch.dtype) -> str:
    """The instruction sets with which torch and oneDNN multiply this type on this processor, such as "AVX512, AMX"."""
    names = [torch.backends.cpu.get_cpu_capability()]
    if dtype == torch.bfloat16 and names[0].startswith("AVX512"):
        names += ["AVX512-BF16"] * torch.cpu._is_avx512_bf16_supported()
        names += ["AMX"] * torch.cpu._is_amx_tile_supported()
    return ", ".join(names)
