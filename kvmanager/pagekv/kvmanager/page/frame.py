"""Frames, each everything the page shows at one moment; and messages that take a reader from one to a later one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.page.block_states import HOST_STATES, STATES, Bytes, change, counts, whole
from pagekv.v1 import operator_service_pb2

# Requests in a frame.
MAX_REQUESTS = 200

Row = dict[str, Any]
# Statistics in a frame, besides the charts.
_TOTALS = (
    "running_sequences", "waiting_sequences", "prompt_tokens_total", "cached_tokens_total", "prefix_hit_rate",
    "generated_tokens_total", "evicted_blocks_total", "preemptions_total", "steps_total", "requests_total",
    "published_blocks", "active_blocks", "utilization", "pins", "executor_attached", "executor_restarts_total",
    "hash_alarms_total", "swapped_out_blocks_total", "swapped_in_blocks_total",
)  # fmt: skip  # several entries a line: one each would fill a screen


@dataclass(frozen=True, slots=True)
class PoolFrame:
    """The page at one moment. Immutable, so readers may keep it."""

    number: int
    epoch: int
    device: Bytes
    host: Bytes
    # Numbers of the last point of the charts and of the last event before this moment.
    points: int
    events: int
    # The rest of a message as it is sent, by name: step, counts of both pools, requests, totals.
    fields: dict[str, Any]


def fields(step: int, device: Bytes, host: Bytes, requests: dict[str, Row], totals: dict[str, Any]) -> dict[str, Any]:
    """All that a frame has besides the blocks."""
    states = {"counts": counts(device, STATES), "host_counts": counts(host, HOST_STATES)}
    return {"step": step, **states, "requests": requests, "totals": totals}


def totals(stats: operator_service_pb2.GetStatsResponse, live_requests: int) -> dict[str, Any]:
    """The statistics in a frame."""
    return {name: getattr(stats, name) for name in _TOTALS} | {"live_requests": live_requests}


def request_rows(engine: EngineLoop) -> tuple[dict[str, Row], int]:
    """Up to MAX_REQUESTS live requests by request id, running ones first; and how many are live."""
    found = engine.queries.list_requests(MAX_REQUESTS)
    names = [field.name for field in operator_service_pb2.RequestInfo.DESCRIPTOR.fields]
    return {info.request_id: {name: getattr(info, name) for name in names} for info in found.requests}, found.total


def snapshot(frame: PoolFrame, model: EngineInfo, boot: str) -> dict[str, Any]:
    """A message for a reader that has no frame of this epoch. A new `boot` says that all counts begin anew: every
    manager counts epochs, steps, points and events from 1.
    """
    return {
        "type": "snapshot",
        "boot": boot,
        "epoch": frame.epoch,
        "model": {
            "id": model.model_id, "backend": model.backend, "block_size": model.block_size,
            "max_model_len": model.max_model_len,
        },
        "blocks": model.num_device_blocks,
        "host_blocks": model.num_host_blocks,
        # Numbers of blocks that are shown, from the first on.
        "shown": len(frame.device),
        "host_shown": len(frame.host),
        "device": whole(frame.device),
        "host": whole(frame.host),
        **frame.fields,
    }  # fmt: skip  # laid out as a table


def delta(old: PoolFrame, new: PoolFrame) -> dict[str, Any]:
    """A message that takes a reader from one frame of an epoch to a later one; unchanged fields are left out."""
    states = {"device": change(old.device, new.device), "host": change(old.host, new.host)}
    message = {name: value for name, value in new.fields.items() if old.fields[name] != value}
    return {"type": "delta", **message, **{name: runs for name, runs in states.items() if runs}}
