"""Token ids that stand for a record's prompt and output, cheap to make and equal exactly where the trace says so.

Every token of a span is the span's hash id. So two prompts agree precisely as far as their hash ids agree, whatever the
block size, and spans with different ids share not even one token. Outputs are not hashed in traces: each request's are
unlike anything else, and a next turn that repeats them has hash ids of its own.

    0 .. 2**30 - 1      hash ids          2**31 .. 2**32 - 1   outputs, by request
    2**30 .. 2**31 - 1  prompts of traces without hash ids, by request
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.replay.trace import TraceRecord

_UNSHARED = 2**30
_OUTPUT = 2**31


def output_tokens(requests: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token ids that the requests with these indices generate again and again."""
    return _OUTPUT + requests


def distinct_prefixes(records: Iterable[TraceRecord]) -> int:
    """How many prefixes, each ending with one hash id, all prompts have between them."""
    tree: dict[tuple[int, int], int] = {}
    for record in records:
        node = -1
        for hash_id in record.hash_ids:
            node = tree.setdefault((node, hash_id), len(tree))
    return len(tree)


def prompt_tokens(record: TraceRecord, index: int, tokens_per_id: int, length: int) -> NDArray[np.uint32]:
    """The first `length` token ids of the prompt of request `index`; its last hash id is repeated to fill up."""
    ids = np.array(record.hash_ids or (_UNSHARED + index,), np.uint32)
    return np.take(ids, np.arange(length) // tokens_per_id, mode="clip")
