"""Every field of an executor's description is held to its bounds, and what follows from it is part of the identity."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.engine.engine_harness import DESCRIPTION, Bench, Link, command, config, described, expect, read, run, until
from support.event_loop import in_event_loop, run_by

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.config import parse_config
from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.description import check_description, served_fingerprint
from pagekv.kvmanager.engine.executor_client import UnfitExecutor
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.steps.v1 import executor_service_pb2 as pb

OUT_OF_BOUNDS: list[tuple[str, Any, str]] = [
    ("model_id", "x" * 4097, "must match"),
    ("model_fingerprint", "", "must match"),
    ("model_fingerprint", "no hex", "must match .*got 'no hex'"),
    ("num_layers", 0, "must be from 1 to 65536, got 0"),
    ("num_kv_heads", 0, "must be from 1 to 65536, got 0"),
    ("head_size", 2**17, "must be from 1 to 65536, got 131072"),
    ("kv_dtype", "", "must match"),
    ("vocab_size", 0, "must be from 1 to 2147483647, got 0"),
    ("max_model_len", 1, "must be from 2 to 2147483647, got 1"),
    ("bytes_per_block", 0, "must be from 1 to"),
    ("device_kv_bytes", 2**63, "must be from 0 to"),
    ("host_kv_bytes", 2**63, "must be from 0 to"),
    ("layout", "", "must match"),
    ("backend", "", "must match"),
    ("versions", {str(number): "1" for number in range(65)}, "must have at most 64 entries, has 65"),
    ("eos_token_ids", [1, 50], "must be from 0 to 49, got 50"),
    ("eos_token_ids", [1] * 961, "must have at most 960 entries, has 961"),
    ("max_sequences", 0, "must be from 1 to"),
    ("contract_revision", 0, "must be from 1 to 65535, got 0"),
    ("features", [1] * 65, "must have at most 64 entries, has 65"),
    ("max_steps_in_flight", 1, "must be from 2 to"),
    ("max_logprobs", 129, "must be from 0 to 128, got 129"),
    ("tensor_parallel_size", 1025, "must be from 0 to 1024, got 1025"),
    ("sampler", "", r"must match \[a-z0-9.-\]\{1,64\}, got ''"),
    ("sampler", "Mine", "must match"),
]


@pytest.mark.parametrize(("field", "value", "words"), OUT_OF_BOUNDS)
def test_fields_have_bounds(field: str, value: Any, words: str) -> None:
    with pytest.raises(UnfitExecutor, match=f"Describe: the executor's {field} {words}"):
        check_description(described(**{field: value}))


def test_every_field_is_held_to_bounds() -> None:
    """But rates and a count, of which any number is one."""
    rates = {
        *("device_to_host_bytes_per_s", "host_to_device_bytes_per_s", "prefill_tokens_per_s"),
        "rank_differences",
    }
    named = {field.name for field in pb.DescribeResponse.DESCRIPTOR.fields}
    assert {field for field, _, _ in OUT_OF_BOUNDS} == named - rates
    check_description(DESCRIPTION)


def test_no_executor_gets_more_steps_than_the_least_that_any_takes() -> None:
    """--pipeline-depth is bounded by the least that the contract asks of `max_steps_in_flight`."""
    with pytest.raises(SystemExit):
        parse_config(["--pipeline-depth", "3"])
    assert parse_config(["--pipeline-depth", "2"]).engine.pipeline_depth == 2
    check_description(described(max_steps_in_flight=2))


def test_a_feature_of_a_later_revision_is_passed_over() -> None:
    description = described(contract_revision=2)
    description.features.append(99)  # type: ignore[arg-type]  # from the future
    check_description(description)


def test_the_fingerprint_is_of_everything_that_decides_tokens() -> None:
    # Resumed streams and KV events of a later version must find the same.
    assert served_fingerprint(DESCRIPTION) == "c5a5ec1c0e6c810f2568b70948e3ae4de748cfccb998f4b95b5a7ecab7c5bf62"
    changes = {"model_fingerprint": "beef", "sampler": "other", "kv_dtype": "other", "layout": "other"}
    found = {served_fingerprint(described(**{field: value})) for field, value in changes.items()}
    assert len(found) == 4
    assert served_fingerprint(DESCRIPTION) not in found
    assert served_fingerprint(described(backend="other", contract_revision=7)) == served_fingerprint(DESCRIPTION)


@pytest.mark.parametrize(("field", "value"), [("contract_revision", 0), ("sampler", "")])
@in_event_loop
async def test_an_executor_without_revision_or_sampler_is_waited_out(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    """It may be replaced by a later version; until then callers and the log are told why nothing is served."""
    bench = Bench()
    bench.description = described(**{field: value})
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Link(bench, wake))
    engine = EngineLoop(config())
    task = asyncio.create_task(engine.run())
    await until(lambda: f"the executor's {field} must" in str(engine.not_attached()))
    with pytest.raises(Unavailable, match=f"no executor is attached yet: Describe: the executor's {field} must"):
        engine.submit(command("a", [1, 2, 3]))
    assert bench.attaches == []
    bench.description = DESCRIPTION
    await engine.wait_ready()
    assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
    await engine.stop(1)
    await task


@run_by(run)
async def test_another_sampler_is_another_model(engine: EngineLoop, bench: Bench) -> None:
    """It would continue with other tokens."""
    bench.step_s = 0.01
    stream = engine.submit(command("a", [1, 2, 3]))
    await until(lambda: len(bench.plans) >= 3)
    bench.description = described(sampler="fake-2")
    assert bench.link is not None
    bench.link.lose()
    with pytest.raises(Unavailable, match="another model"):
        await read(stream)
