"""FlashInfer in a rehearsal: the same calls, answered by torch."""

from __future__ import annotations

from typing import Any

import torch

__version__ = "rehearsed"


class BatchDecodeWithPagedKVCacheWrapper:
    """One query a sequence."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        self._layout = layout

    def plan(self, *arguments: Any, **types: Any) -> None:
        """Where the pages are."""
        self._planned = arguments

    def run(self, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """As many bytes read as there are."""
        return out.copy_(query * cache.float().mean().nan_to_num())


class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Prompts."""
