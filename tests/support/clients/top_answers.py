"""Answers of a server that `pagekv top` looks at."""

from __future__ import annotations

from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

STATS = operator_pb.GetStatsResponse(
    block_size=16, num_device_blocks=100, free_blocks=60, cached_free_blocks=40, active_blocks=40, kv_usage=0.4,
    utilization=0.9, running_sequences=2, waiting_sequences=1, prompt_tokens_total=1000, cached_tokens_total=500,
    prefix_hit_rate=0.5, generated_tokens_total=300, steps_total=50, executor_busy_us_total=500_000,
    executor_attached=True, num_host_blocks=20, host_cached_blocks=5, host_held_blocks=2, pinned_blocks=3,
)  # fmt: skip  # several entries a line: one each would fill a screen
INFO = pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16)
_RUNNING, _WAITING = types_pb2.SEQUENCE_STATE_RUNNING, types_pb2.SEQUENCE_STATE_WAITING
LISTED = operator_pb.ListRequestsResponse(
    requests=[
        operator_pb.RequestInfo(request_id=f"request-{number}", state=_RUNNING if number < 2 else _WAITING,
                             prompt_tokens=64, cached_tokens=48, generated_tokens=number, num_blocks=5)
        for number in range(3)
    ],
    total=3,
)  # fmt: skip  # several entries a line: one each would fill a screen
