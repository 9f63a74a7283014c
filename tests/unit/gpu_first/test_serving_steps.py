"""Steps that run a model, over a backend that does nothing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_first import serving_steps
from gpu_first.in_process import StepTime
from gpu_first.records import Records, StepLog, of_step
from gpu_first.step import Context

from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.cuda.torch_sampler import TorchSampling


@pytest.mark.parametrize("replays", [0, 2])
def test_no_figure_of_graphs_without_a_replayed_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: int
) -> None:
    graphs = SimpleNamespace(num_captured=5, num_replayed=0)
    backend = SimpleNamespace(
        runner=SimpleNamespace(graphs=graphs), forward=object.__new__(FusedLayers), sampler=TorchSampling
    )

    def decodes(*args: Any) -> StepTime:
        graphs.num_replayed += replays
        return StepTime(0.002, 0.001, 0.003)

    monkeypatch.setattr(serving_steps, "model", lambda context: (tmp_path, 100))
    monkeypatch.setattr(serving_steps, "backend_of", lambda *args, **options: backend)
    monkeypatch.setattr(serving_steps, "allocate", lambda *args: None)
    monkeypatch.setattr(serving_steps, "decode_seconds", decodes)
    monkeypatch.setattr(serving_steps, "mixed_seconds", lambda *args: 0.01)
    records = Records(tmp_path / "part3.jsonl")
    log = StepLog(records, "with_graphs")
    serving_steps.step_with_graphs(Context(log, tmp_path, small=True, deadline=time.time() + 60))
    rows = [row for row in of_step(records.read(), "with_graphs", "row") if row["case"].startswith("batch")]
    checks = of_step(records.read(), "with_graphs", "check")
    ours, checks = checks[:2], checks[2:]
    assert [(check["name"], check["passed"]) for check in ours] == [
        ("layers are fused", True),
        ("tokens are sampled by the kernel", False),
    ]
    assert [row["graphs_replayed"] for row in rows] == [replays] * len(checks) * bool(replays)
    assert [row["counts_for"] for row in rows[:2]] == ([{"batch 1, greedy": 500.0}, {}] if replays else [])
    assert len(checks) == 4
    assert {check["passed"] for check in checks} == {bool(replays)}
