"""transformers' model as the cuda backend runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from support.executor.cuda_host import HostDevice, save_small_model

from pagekv.executor.cuda.choose_forward import _logits
from pagekv.executor.cuda.forward import TransformersForward
from pagekv.executor.model.loading import load_model


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a prompt's last token and the token behind it."""
    model = save_small_model("gpt2", tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    found = _logits(TransformersForward(loaded.model), loaded, HostDevice())
    tokens = torch.tensor([[index % loaded.vocab_size for index in range(1, 10)]])
    with torch.inference_mode():
        expected = model(tokens).logits[0, -2:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
