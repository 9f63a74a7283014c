"""Bytes of one message at most, on every link."""

from __future__ import annotations

# Of a message to a manager, and to gRPC's servers unless told otherwise. gRPC copies a message within the event loop,
# in about a millisecond for each MiB: a larger bound would be a longer silence. Answers have no bound but what they are
# made of.
MAX_RECEIVE_BYTES = 4 * 2**20
# Of a result to a manager, and of the largest step of all (P13 in executor_service.proto).
MAX_RESULT_BYTES = MAX_STEP_BYTES = 256 * 2**20
# Of a step for each token of the longest sequence: an id of 5 bytes and, for the block of one token, its own id, and
# copies in and out, each of two.
STEP_BYTES_PER_TOKEN = 32


def max_step_bytes(max_model_len: int) -> int:
    """Bytes of the largest step that an executor takes, by the tokens of its longest sequence (P13)."""
    return min(MAX_STEP_BYTES, max(MAX_RECEIVE_BYTES, STEP_BYTES_PER_TOKEN * max_model_len))
