"""The instruction set, by what torch says of the processor."""

from __future__ import annotations

import pytest
import torch

from pagekv.executor.cpu.instruction_set import instruction_set


@pytest.mark.parametrize(
    ("capability", "bf16", "amx", "dtype", "expected"),
    [
        ("AVX512", True, True, torch.bfloat16, "AVX512, AVX512-BF16, AMX"),
        ("AVX512", True, False, torch.bfloat16, "AVX512, AVX512-BF16"),
        ("AVX512", True, True, torch.float32, "AVX512"),
        # ATEN_CPU_CAPABILITY may say less than the processor can.
        ("AVX2", True, True, torch.bfloat16, "AVX2"),
        ("DEFAULT", False, False, torch.float32, "DEFAULT"),
    ],
)
def test_instruction_set(
    monkeypatch: pytest.MonkeyPatch, capability: str, bf16: bool, amx: bool, dtype: torch.dtype, expected: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert instruction_set(dtype) == expected


def test_this_machine() -> None:
    assert instruction_set(torch.float32)
