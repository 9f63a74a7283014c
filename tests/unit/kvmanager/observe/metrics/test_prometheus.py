"""/metrics: the numbers of an engine that ran, and nothing that docs/metrics.md does not explain."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.clients.certificates import Authority
from support.clients.protected_stack import write_identities
from support.engine import engine_harness as harness
from support.engine.engine_harness import Bench, command, read
from support.event_loop import run_by

import pagekv.kvmanager
from pagekv.common.tls_flags import TlsConfig
from pagekv.kvmanager.access.flags import AccessConfig
from pagekv.kvmanager.access.opening import open_access
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.observe.http_server import HttpServer
from pagekv.kvmanager.observe.metrics.access_metrics import AccessCollector
from pagekv.kvmanager.observe.metrics.prometheus import EngineCollector, metrics_routes
from pagekv.kvmanager.observe.metrics.request_metrics import MAX_ADAPTERS, RequestMetrics
from pagekv.kvmanager.observe.metrics.tenant_metrics import TenantCollector
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

VLLM = {"model_name": "fake", "engine": "0"}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LIMITS = SchedulerLimits(max_batch_tokens=64, max_running=32, watermark=0.0, prefix_cache=True)

# The page that explains all metrics.
PAGE = Path(pagekv.kvmanager.__file__).parents[3] / "docs" / "metrics.md"

Value = Callable[..., float]


def scrape(engine: EngineLoop, requests: RequestMetrics, *, prefix_cache: bool = True) -> Value:
    """Values of one scrape: value(name, label=...)."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, requests, prefix_cache=prefix_cache))

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(name, (VLLM if name.startswith("vllm:") else {}) | labels)
        assert found is not None, f"{name} {labels} is not there"
        return found

    return value


def run(
    body: Callable[[EngineLoop, Bench, RequestMetrics], Awaitable[None]],
    requests: RequestMetrics | None = None,
    **changes: object,
) -> None:
    """The harness with the metrics' observer."""
    observer = requests or RequestMetrics()
    harness.run(lambda engine, bench: body(engine, bench, observer), observers=[observer], **changes)


@pytest.mark.skipif(
    shutil.which("promtool") is None and "CI" not in os.environ, reason="Debian's package prometheus has promtool"
)
def test_promtool_minds_nothing_but_the_colons_of_vllms_names() -> None:
    async def body(engine: EngineLoop, bench: Bench, requests: RequestMetrics) -> None:
        await read(engine.submit(command("a", PROMPT)))
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine, requests, prefix_cache=True))
        text.append(generate_latest(registry).decode())

    text: list[str] = []
    run(body)
    done = subprocess.run(["promtool", "check", "metrics"], input=text[0], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    assert lines
    assert [line for line in lines if not re.fullmatch(r"vllm:\S+ metric names should not contain ':'", line)] == []


@run_by(run)
async def test_help_and_docs_name_every_limit_that_refuses_requests(
    engine: EngineLoop, bench: Bench, requests: RequestMetrics
) -> None:
    """The limits for which `check_admissible` raises Overloaded."""
    name = "pagekv_requests_rejected"
    (help,) = (
        each.documentation
        for each in EngineCollector(engine, requests, prefix_cache=True).collect()
        if each.name == name
    )
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}_total`"))
    for limit in ("--max-queue", "unread", "tokens_per_minute", "max_waiting"):
        assert limit in help
        assert limit in row


@run_by(run)
async def test_tokens_hits_and_ends_are_counted(engine: EngineLoop, bench: Bench, requests: RequestMetrics) -> None:
    """Queries and hits are tokens, as in vLLM; blocks have names of their own, and misses their reasons."""
    bench.bend = lambda result: replace(result, threads=2, rank_us=(1000, 3000))
    for name in ("a", "b"):
        await read(engine.submit(command(name, PROMPT)))
    value = scrape(engine, requests)
    assert value("vllm:prefix_cache_queries_total") == value("vllm:prompt_tokens_total") == 18
    assert value("vllm:prefix_cache_hits_total") == 8
    assert value("vllm:generation_tokens_total") == 12
    assert value("vllm:request_success_total", finished_reason="length") == 2
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == 0
    assert value("pagekv_prompt_blocks_total") == 6
    assert value("pagekv_prompt_blocks_cached_total") == 2 * 2 - 2
    assert value("pagekv_prefix_misses_total", reason="never_seen") == 1
    assert value("pagekv_prefix_misses_total", reason="partial_tail") == 1
    assert value("pagekv_pool_blocks", tier="device") == 64
    assert value("pagekv_free_blocks", tier="device") == 64
    assert value("pagekv_cached_free_blocks", tier="device") == value("pagekv_cached_blocks", tier="device") == 3
    assert value("pagekv_executor_attached") == 1
    assert value("pagekv_executor_threads") == 2
    assert value("pagekv_executor_rank_step_seconds", rank="1") == 0.003
    # As the harness's executor says.
    assert value("pagekv_executor_graphs", outcome="recorded") == 5
    assert value("pagekv_executor_graphs", outcome="failed") == 0
    assert value("pagekv_step_seconds_count") == engine.statistics.stats().steps_total
    assert value("pagekv_step_tokens_sum") == value("pagekv_computed_tokens_total") > 12
    for histogram in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert value(f"vllm:{histogram}_seconds_count") == 2
    assert value("vllm:request_prompt_tokens_sum") == 18
    assert value("vllm:request_generation_tokens_sum") == 12
    off = scrape(engine, requests, prefix_cache=False)
    assert off("vllm:prefix_cache_queries_total") == off("vllm:prefix_cache_hits_total") == 0


@run_by(run, num_device_blocks=40)
async def test_every_token_but_a_first_one_has_a_gap(
    engine: EngineLoop, bench: Bench, requests: RequestMetrics
) -> None:
    """Also with forks, preemptions and a lost executor."""
    bench.step_s = 0.001
    streams = [engine.submit(command(f"r{i}", [i, *PROMPT], max_tokens=30, n=1 + i % 3)) for i in range(6)]
    reading = asyncio.gather(*(read(stream) for stream in streams))
    await harness.until(lambda: engine.statistics.stats().generated_tokens_total > 60)
    assert bench.link is not None
    bench.link.lose()
    await reading
    value = scrape(engine, requests)
    sequences = sum(1 + i % 3 for i in range(6))
    tokens = value("vllm:generation_tokens_total")
    assert tokens == 30 * sequences
    assert value("vllm:time_to_first_token_seconds_count") == sequences
    assert value("vllm:inter_token_latency_seconds_count") == tokens - sequences
    assert value("vllm:request_success_total", finished_reason="length") == sequences
    assert value("pagekv_executor_restarts_total") == 1
    assert value("vllm:num_preemptions_total") > 0


@run_by(run)
async def test_hits_are_counted_by_adapter(engine: EngineLoop, bench: Bench, requests: RequestMetrics) -> None:
    """Together what is counted for all; adapters beyond the bound share a name."""
    identities = [CacheIdentity(adapter_id=name) for name in ("", "a", "a", "", *map(str, range(120)), "119")]
    for number, identity in enumerate(identities):
        await read(engine.submit(replace(command(f"r{number}", PROMPT, max_tokens=1), identity=identity)))
    value = scrape(engine, requests)
    for adapter, prompts, cached in (("", 18, 8), ("a", 18, 8), ("0", 9, 0), ("(other)", 9 * 22, 8)):
        assert value("pagekv_adapter_prompt_tokens_total", adapter=adapter) == prompts
        assert value("pagekv_adapter_cached_tokens_total", adapter=adapter) == cached
    assert len(requests.prompts) == len(requests.cached) == MAX_ADAPTERS + 2
    assert sum(requests.prompts.values()) == value("vllm:prompt_tokens_total")
    assert sum(requests.cached.values()) == value("vllm:prefix_cache_hits_total")


@run_by(run, num_device_blocks=40)
async def test_holders_of_blocks_and_what_is_promised(
    engine: EngineLoop, bench: Bench, requests: RequestMetrics
) -> None:
    """Five continuations hold the two full blocks of their prompt; a pool of 40 blocks owes each of them ten."""
    bench.step_s = 0.01
    stream = engine.submit(command("a", PROMPT, max_tokens=32, n=5))
    await harness.until(lambda: engine.statistics.stats().running_sequences == 5)
    value = scrape(engine, requests)
    assert value("pagekv_held_blocks", holders="5-8") == 2
    assert value("vllm:kv_cache_usage_perc") == value("pagekv_active_blocks", tier="device") / 40 > 0
    names = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-")
    held = sum(value("pagekv_held_blocks", holders=name) for name in names)
    assert held == value("pagekv_active_blocks", tier="device")
    assert value("pagekv_promised_blocks") == 5 * 10
    assert value("pagekv_promised_blocks") > value("pagekv_pool_blocks", tier="device")
    await read(stream)
    assert engine.queries.pin_prefix(PROMPT, CacheIdentity(), 60).pinned_tokens == 8
    value = scrape(engine, requests)
    assert (value("pagekv_pins"), value("pagekv_pinned_blocks", tier="device")) == (1, 2)
    assert value("pagekv_held_blocks", holders="1") == value("pagekv_active_blocks", tier="device") == 2
    assert value("pagekv_cached_free_blocks", tier="device") == value("pagekv_cached_blocks", tier="device") - 2 > 0
    engine.queries.reset_prefix_cache(force=True)
    value = scrape(engine, requests)
    assert value("pagekv_promised_blocks") == sum(value("pagekv_held_blocks", holders=name) for name in names) == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemptions_by_mode_and_what_they_move(mode: str) -> None:
    async def body(engine: EngineLoop, bench: Bench, requests: RequestMetrics) -> None:
        bench.description = harness.described(bytes_per_block=3, device_kv_bytes=60, host_kv_bytes=300)
        assert bench.link is not None
        bench.link.lose()
        await harness.until(lambda: len(bench.attaches) == 2)
        await harness.until(lambda: engine.statistics.stats().executor_attached)
        await asyncio.gather(*(read(engine.submit(command(f"r{i}", [i] * 9, max_tokens=30))) for i in range(4)))
        value = scrape(engine, requests)
        other = {"swap": "recompute", "recompute": "swap"}[mode]
        assert value("pagekv_preemptions_total", mode=mode) > 0
        assert value("pagekv_preemptions_total", mode=other) == 0
        for direction in ("in", "out"):
            blocks = value("pagekv_swapped_blocks_total", direction=direction)
            assert (blocks > 0) == (mode == "swap")
            assert value("pagekv_swapped_bytes_total", direction=direction) == 3 * blocks

    run(body, limits=replace(LIMITS, swap=SwapPolicy(mode)))


@run_by(run)
async def test_ends_by_reason(engine: EngineLoop, bench: Bench, requests: RequestMetrics) -> None:
    aborted = engine.submit(command("aborted", PROMPT, max_tokens=100, n=2))
    engine.abort("aborted")
    await read(aborted)
    stopped = engine.submit(command("stop string", PROMPT, max_tokens=100, n=2))
    await stopped.take()
    engine.finish_sequence(stopped, 0)
    engine.finish_sequence(stopped, 1)
    searching = SamplingParams(max_tokens=4, beam_width=3)
    await read(engine.submit(GenerateCommand("beams", PROMPT, searching, 2)))
    value = scrape(engine, requests)
    ends = {r: value("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")}
    assert ends == {"stop": 2, "length": 2, "abort": 2, "error": 0}
    assert value("pagekv_requests_total") == 3
    assert value("pagekv_requests_aborted_total") == 1


def test_before_the_first_attachment_there_is_little_to_say() -> None:
    async def body() -> list[Metric]:
        engine = EngineLoop(harness.config())
        return list(EngineCollector(engine, RequestMetrics(), prefix_cache=True, insecure_listeners=2).collect())

    found = {metric.name: metric.samples[0].value for metric in asyncio.run(body())}
    assert found == {"pagekv_executor_attached": 0, "pagekv_insecure_listeners": 2}


def test_every_metric_is_explained_and_every_explained_one_is_there(tmp_path: Path) -> None:
    """The table of docs/metrics.md and the registry name the same metrics, with the same labels and types."""
    rows = re.findall(r"^\| `([a-z:_0-9]+)(?:\{([a-z_, ]*)\})?` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    explained = {name: (kind, set(filter(None, labels.split(", ")))) for name, labels, kind in rows}

    async def body(engine: EngineLoop, bench: Bench, requests: RequestMetrics) -> None:
        await read(engine.submit(command("a", PROMPT)))
        served = {}
        accounts = engine._state.accounts
        accounts.of("a").usage.refusals["max_running"] += 1
        engine._state.totals.executor_rank_us.append(7)
        collectors = (
            EngineCollector(engine, requests, prefix_cache=True),
            AccessCollector(access),
            TenantCollector(engine.statistics, accounts),
        )
        families = [family for collector in collectors for family in collector.collect()]
        for family in families:
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            served[name] = (family.type, labels - set(VLLM) if name.startswith("vllm:") else labels)
        assert served == explained

    pair = Authority(tmp_path).pair("pagekv-manager")
    write_identities(tmp_path / "identities.toml")
    tls, identities = TlsConfig(str(pair.cert), str(pair.key)), str(tmp_path / "identities.toml")
    access = open_access(AccessConfig(tls, identities=identities, audit_log=str(tmp_path / "audit.jsonl")))
    run(body)
    access.close()


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
@run_by(run)
async def test_it_is_served_over_http(
    engine: EngineLoop, bench: Bench, requests: RequestMetrics, *, accept: str
) -> None:
    """Names stay as they are, whatever the scraper prefers."""
    await read(engine.submit(command("a", PROMPT)))
    collector = EngineCollector(engine, requests, prefix_cache=True)
    server = HttpServer("127.0.0.1:0", metrics_routes(collector))
    port = await server.start()
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/metrics"
        async with session.get(url, headers={"Accept": accept}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
    await server.stop()
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="fake"} 9.0' in text
    read_back = {family.name for family in text_string_to_metric_families(text)}
    assert read_back == {family.name for family in collector.collect()}
