"""Names of torch's element types."""

from __future__ import annotations

import torch

from pagekv.kernels.tensors import dtype_name


def test_names_of_element_types() -> None:
    assert dtype_name(torch.zeros(1, dtype=torch.float8_e4m3fn)) == "float8_e4m3fn"
