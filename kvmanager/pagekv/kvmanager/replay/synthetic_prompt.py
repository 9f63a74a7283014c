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


def output_tokens(requests: NDArray[np.intp]) -> NDArray[np.intp]:
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


def prompt_ids(record: TraceRecord, index: int, tokens_per_id: int) -> list[int]:
    """The prompt of request `index`, `record.input_length` token ids."""
    if not record.hash_ids:
        return [_UNSHARED + index] * record.input_length
    tokens: list[int] = []
    for hash_id in record.hash_ids:
        tokens += [hash_id] * tokens_per_id
    del tokens[record.input_length :]
    return tokens


def prompt_bytes(record: TraceRecord, tokens_per_id: int, length: int) -> bytes:
    """`length` token ids of the prompt as `block_hash.token_bytes` gives them; the last id is repeated to fill up."""
    ids = np.asarray(record.hash_ids, dtype="<u4")
    spans = np.repeat(ids, tokens_per_id)[:length]
    tail = np.full(length - len(spans), ids[-1], dtype="<u4")
    return spans.tobytes() + tail.tobytes()
