"""`GET /metrics` for Prometheus. docs/metrics.md says what each metric means and when to worry.

Counters and gauges are read from the engine when somebody scrapes, so they cost a step nothing, and a scrape costs the
same whatever the size of the pool; histograms are kept by `RequestMetrics`. Where vLLM has a metric of the same meaning
the name and the labels are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.interface import Engine
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.observe.metrics.histogram import Histogram
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from pagekv.v1.cache_service_pb2 import GetStatsResponse

# One value, or one for each value of a label.
Values = float | Mapping[str, float]
# Labels that all samples of a family have.
Labels = Mapping[str, str]
_NONE: Labels = {}


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    values: Values,
    label: str = "",
    common: Labels = _NONE,
) -> Metric:
    family = kind(name, text, labels=[*common, label] if label else [*common])
    if isinstance(values, Mapping):
        for of, value in values.items():
            family.add_metric([*common.values(), of], value)
    else:
        family.add_metric([*common.values()], values)
    return family


# Samples of a counter are called `name`_total.
_counter, _gauge = partial(_family, CounterMetricFamily), partial(_family, GaugeMetricFamily)


def _histogram(name: str, text: str, histogram: Histogram, common: Labels = _NONE) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[*common])
    family.add_metric([*common.values()], histogram.buckets(), histogram.total)
    return family


class EngineCollector(Collector):
    """Used on the event loop, between two steps."""

    def __init__(self, engine: Engine, requests: RequestMetrics, *, prefix_cache: bool) -> None:
        """`requests` observes the engine. `prefix_cache`: whether prompts are looked up at all."""
        self._engine = engine
        self._requests = requests
        self._prefix_cache = prefix_cache

    def collect(self) -> Iterator[Metric]:
        model = self._engine.model
        try:
            stats = self._engine.queries.stats()
        except Unavailable:
            stats = None
        attached = stats is not None and stats.executor_attached
        yield _gauge("pagekv_executor_attached", "1 while an executor is attached, else 0", attached)
        if model is not None and stats is not None:
            name = model.model_id or model.backend
            yield from self._vllm(stats, {"model_name": name, "engine": "0"})
            yield from _pool(stats)
            yield from _cache(stats, model)
            yield from self._steps(stats)
            labels = {"model_name": name, "backend": model.backend, "block_size": str(model.block_size)}
            yield _gauge("pagekv_info", "Always 1; what is served", 1, common=labels)

    def _vllm(self, stats: GetStatsResponse, common: Labels) -> Iterator[Metric]:
        """Metrics whose meaning is vLLM's."""
        looked_up = self._prefix_cache
        requests = self._requests
        queries, hits = stats.prompt_tokens_total * looked_up, stats.cached_tokens_total * looked_up
        for name, text, count in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", hits),
            ("num_preemptions", "Preemptions", stats.preemptions_total),
            ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens generated", stats.generated_tokens_total),
        ):
            yield _counter(f"vllm:{name}", text, count, common=common)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "Held blocks / blocks of the device pool, 0 to 1", stats.kv_usage, common=common
        )
        yield _gauge("vllm:num_requests_running", "Sequences that hold blocks", stats.running_sequences, common=common)
        yield _gauge(
            "vllm:num_requests_waiting", "Sequences that wait for blocks", stats.waiting_sequences, common=common
        )
        yield _counter(
            "vllm:request_success", "Sequences that ended, by why", requests.finished, "finished_reason", common
        )
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From queued to the first token", requests.time_to_first_token),
            ("inter_token_latency_seconds", "Between tokens of a sequence", requests.inter_token_latency),
            ("e2e_request_latency_seconds", "From queued to the end", requests.e2e_latency),
            ("request_queue_time_seconds", "From queued to the first step", requests.queue_time),
            ("request_prefill_time_seconds", "From the first step to the first token", requests.prefill_time),
            ("request_decode_time_seconds", "From the first token to the end", requests.decode_time),
            ("request_prompt_tokens", "Prompt tokens of a request", requests.prompt_tokens),
            ("request_generation_tokens", "Tokens generated for a sequence", requests.generation_tokens),
        ):
            yield _histogram(f"vllm:{name}", text, histogram, common)

    def _steps(self, stats: GetStatsResponse) -> Iterator[Metric]:
        yield _histogram("pagekv_step_seconds", "A step in the executor", self._requests.step_seconds)
        yield _histogram("pagekv_step_tokens", "Tokens computed in a step", self._requests.step_tokens)
        busy, idle = stats.executor_busy_us_total * 1e-6, stats.executor_idle_us_total * 1e-6
        refused = "Requests refused: too much waits, to be computed or to be read"
        for name, text, count in (
            ("pagekv_computed_tokens", "Tokens computed", stats.computed_tokens_total),
            ("pagekv_executor_busy_seconds", "Seconds in steps", busy),
            ("pagekv_executor_idle_seconds", "Seconds between steps while there was work", idle),
            ("pagekv_executor_restarts", "Epochs after the first", stats.executor_restarts_total),
            ("pagekv_requests", "Requests accepted", stats.requests_total),
            ("pagekv_requests_aborted", "Requests aborted", stats.aborted_requests_total),
            ("pagekv_requests_rejected", refused, stats.rejected_requests_total),
        ):
            yield _counter(name, text, count)


def _pool(stats: GetStatsResponse) -> Iterator[Metric]:
    for name, text, device, host in (
        ("pagekv_pool_blocks", "Blocks", stats.num_blocks, stats.num_host_blocks),
        (
            "pagekv_free_blocks",
            "Blocks held by nobody, cached ones included",
            stats.free_blocks,
            stats.num_host_blocks - stats.host_held_blocks,
        ),
        ("pagekv_active_blocks", "Blocks held by sequences or pins", stats.active_blocks, stats.host_held_blocks),
        (
            "pagekv_cached_blocks",
            "Blocks that a prompt can hit, held ones included",
            stats.published_blocks,
            stats.host_cached_blocks,
        ),
    ):
        yield _gauge(name, text, {"device": device, "host": host}, "tier")
    for name, text, device in (
        ("pagekv_cached_free_blocks", "Cached blocks held by nobody", stats.cached_free_blocks),
        ("pagekv_pinned_blocks", "Blocks under a pin", stats.pinned_blocks),
    ):
        yield _gauge(name, text, {"device": device}, "tier")
    yield _gauge("pagekv_pins", "Pins", stats.pins)
    yield _gauge("pagekv_watchers", "Readers of WatchEvents", stats.watchers)
    unread = "Sequences that have ended in calls that are not read to their end"
    yield _gauge("pagekv_unread_sequences", unread, stats.unread_sequences)
    yield _gauge("pagekv_slot_utilization", "Filled slots / slots of held blocks, 0 to 1", stats.utilization)


def _cache(stats: GetStatsResponse, model: EngineInfo) -> Iterator[Metric]:
    yield _counter("pagekv_prompt_blocks", "Blocks of admitted prompts", stats.prompt_blocks_total)
    yield _counter("pagekv_prompt_blocks_cached", "Of those, hits", stats.cached_blocks_total)
    yield _counter(
        "pagekv_prefix_misses",
        "Prompts by why their first block that missed did",
        {
            "never_seen": stats.misses_never_seen_total,
            "evicted": stats.misses_evicted_total,
            "cleared": stats.misses_cleared_total,
            "diverged": stats.misses_diverged_total,
            "partial_tail": stats.misses_partial_tail_total,
        },
        "reason",
    )
    yield _counter(
        "pagekv_evicted_blocks",
        "Cached blocks evicted",
        {"device": stats.evicted_blocks_total, "host": stats.host_evicted_blocks_total},
        "tier",
    )
    yield _counter(
        "pagekv_preemptions",
        "Preemptions by what became of the blocks",
        {
            "swap": stats.swap_preemptions_total,
            "recompute": stats.preemptions_total - stats.swap_preemptions_total,
        },
        "mode",
    )
    moved = {
        "out": stats.swapped_out_blocks_total,
        "in": stats.swapped_in_blocks_total,
        "write_back": stats.written_back_blocks_total,
    }
    yield _counter("pagekv_swapped_blocks", "Blocks copied between device and host", moved, "direction")
    yield _counter(
        "pagekv_swapped_bytes",
        "Bytes copied between device and host",
        {direction: blocks * model.bytes_per_block for direction, blocks in moved.items()},
        "direction",
    )
    yield _counter("pagekv_hash_alarms", "Digests that stood for other tokens", stats.hash_alarms_total)


def metrics_routes(collector: Collector) -> list[web.AbstractRouteDef]:
    """`GET /metrics`, with a registry of its own."""
    registry = CollectorRegistry()
    registry.register(collector)

    async def metrics(request: web.Request) -> web.Response:
        # Never OpenMetrics: prometheus-client would write vllm_ for vllm: to a scraper that asks for no escaping.
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return [web.get("/metrics", metrics)]
