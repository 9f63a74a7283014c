"""Bytes of one message at most, on every link."""

from __future__ import annotations

# Of a message to a manager or an executor (P13 in executor_service.proto), as gRPC's servers take unless told
# otherwise. gRPC copies a message within the event loop, in about a millisecond for each MiB: a larger bound would be a
# longer silence. Answers have no bound but what they are made of.
MAX_RECEIVE_BYTES = 4 * 2**20
# Of a result to a manager.
MAX_RESULT_BYTES = 256 * 2**20
