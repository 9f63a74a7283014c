"""The largest message, in bytes, on every link."""

from __future__ import annotations

# A message to a manager or an executor (P13 in executor_service.proto); gRPC's default. gRPC copies a message within
# the event loop, which takes about a millisecond for each MiB, so a larger bound would hold up the loop for longer.
# Answers are bounded only by their content.
MAX_RECEIVE_BYTES = 4 * 2**20
# A step's result to a manager.
MAX_RESULT_BYTES = 256 * 2**20
