"""What Prometheus scrapes: `GET /metrics`. METRICS.md says what each metric means and when to worry.

Counters and gauges are read from the engine when somebody scrapes, so they cost a step nothing, and a scrape costs the
same whatever the size of the pool; histograms are kept by `RequestMetrics`. Where vLLM has a metric of the same meaning
the name and the labels are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.interface import Engine, EngineInfo
from pagekv.kvmanager.engine.views import EngineStats
from pagekv.kvmanager.observe.metrics.histogram import Histogram
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics

Values = Mapping[tuple[str, ...], float]
_TIER, _DEVICE, _HOST = ("tier",), ("device",), ("host",)


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
        yield _gauge("pagekv_executor_attached", "1 while an executor is attached, else 0", {(): attached})
        if model is not None and stats is not None:
            yield from self._vllm(stats, _Labelled(model.model_id or model.backend))
            yield from _pool(stats)
            yield from _cache(stats, model)
            yield from self._steps(stats)
            yield _gauge(
                "pagekv_info",
                "Always 1; what is served",
                {(model.model_id or model.backend, model.backend, str(model.block_size)): 1},
                ("model_name", "backend", "block_size"),
            )

    def _vllm(self, stats: EngineStats, of: _Labelled) -> Iterator[Metric]:
        """Those whose meaning is vLLM's."""
        looked_up = self._prefix_cache
        requests = self._requests
        yield of.counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            stats.prompt_tokens_total if looked_up else 0,
        )
        yield of.counter(
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache",
            stats.cached_tokens_total if looked_up else 0,
        )
        yield of.gauge("vllm:kv_cache_usage_perc", "Held blocks / blocks of the device pool, 0 to 1", stats.kv_usage)
        yield of.gauge("vllm:num_requests_running", "Sequences that hold blocks", stats.running_sequences)
        yield of.gauge("vllm:num_requests_waiting", "Sequences that wait for blocks", stats.waiting_sequences)
        yield of.counter("vllm:num_preemptions", "Preemptions", stats.preemptions_total)
        yield of.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens_total)
        yield of.counter("vllm:generation_tokens", "Tokens generated", stats.generated_tokens_total)
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by why", labels=[*of.names, "finished_reason"]
        )
        for reason, count in requests.finished.items():
            success.add_metric([*of.values, reason], count)
        yield success
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From queued to the first token", requests.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Between tokens of a sequence", requests.inter_token_latency),
            ("vllm:e2e_request_latency_seconds", "From queued to the end", requests.e2e_latency),
            ("vllm:request_queue_time_seconds", "From queued to the first step", requests.queue_time),
            ("vllm:request_prefill_time_seconds", "From the first step to the first token", requests.prefill_time),
            ("vllm:request_decode_time_seconds", "From the first token to the end", requests.decode_time),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request", requests.prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens generated for a sequence", requests.generation_tokens),
        ):
            yield of.histogram(name, text, histogram)

    def _steps(self, stats: EngineStats) -> Iterator[Metric]:
        plain = _Labelled(None)
        yield plain.histogram("pagekv_step_seconds", "A step in the executor", self._requests.step_seconds)
        yield plain.histogram("pagekv_step_tokens", "Tokens computed in a step", self._requests.step_tokens)
        yield _counter("pagekv_computed_tokens", "Tokens computed", {(): stats.computed_tokens_total})
        yield _counter("pagekv_executor_busy_seconds", "Seconds in steps", {(): stats.executor_busy_us_total * 1e-6})
        yield _counter(
            "pagekv_executor_idle_seconds",
            "Seconds between steps while there was work",
            {(): stats.executor_idle_us_total * 1e-6},
        )
        yield _counter("pagekv_executor_restarts", "Epochs after the first", {(): stats.executor_restarts_total})
        yield _counter("pagekv_requests", "Requests accepted", {(): stats.requests_total})
        yield _counter("pagekv_requests_aborted", "Requests aborted", {(): stats.aborted_requests_total})
        yield _counter(
            "pagekv_requests_rejected",
            "Requests refused: too much waits, to be computed or to be read",
            {(): stats.rejected_requests_total},
        )


def _pool(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("pagekv_pool_blocks", "Blocks", {_DEVICE: stats.num_blocks, _HOST: stats.num_host_blocks}, _TIER)
    yield _gauge(
        "pagekv_free_blocks",
        "Blocks held by nobody, cached ones included",
        {_DEVICE: stats.free_blocks, _HOST: stats.num_host_blocks - stats.host_held_blocks},
        _TIER,
    )
    yield _gauge(
        "pagekv_active_blocks",
        "Blocks held by sequences or pins",
        {_DEVICE: stats.active_blocks, _HOST: stats.host_held_blocks},
        _TIER,
    )
    yield _gauge(
        "pagekv_cached_blocks",
        "Blocks that a prompt can hit, held ones included",
        {_DEVICE: stats.published_blocks, _HOST: stats.host_cached_blocks},
        _TIER,
    )
    yield _gauge(
        "pagekv_cached_free_blocks", "Cached blocks held by nobody", {_DEVICE: stats.cached_free_blocks}, _TIER
    )
    yield _gauge("pagekv_pinned_blocks", "Blocks under a pin", {_DEVICE: stats.pinned_blocks}, _TIER)
    yield _gauge("pagekv_pins", "Pins", {(): stats.pins})
    yield _gauge("pagekv_watchers", "Readers of WatchEvents", {(): stats.watchers})
    unread = "Sequences that have ended in calls that are not read to their end"
    yield _gauge("pagekv_unread_sequences", unread, {(): stats.unread_sequences})
    yield _gauge("pagekv_slot_utilization", "Filled slots / slots of held blocks, 0 to 1", {(): stats.utilization})


def _cache(stats: EngineStats, model: EngineInfo) -> Iterator[Metric]:
    yield _counter("pagekv_prompt_blocks", "Blocks of admitted prompts", {(): stats.prompt_blocks_total})
    yield _counter("pagekv_prompt_blocks_cached", "Of those, hits", {(): stats.cached_blocks_total})
    yield _counter(
        "pagekv_prefix_misses",
        "Prompts by why their first block that missed did",
        {
            ("never_seen",): stats.misses_never_seen_total,
            ("evicted",): stats.misses_evicted_total,
            ("cleared",): stats.misses_cleared_total,
            ("diverged",): stats.misses_diverged_total,
            ("partial_tail",): stats.misses_partial_tail_total,
        },
        ("reason",),
    )
    yield _counter(
        "pagekv_evicted_blocks",
        "Cached blocks evicted",
        {_DEVICE: stats.evicted_blocks_total, _HOST: stats.host_evicted_blocks_total},
        _TIER,
    )
    yield _counter(
        "pagekv_preemptions",
        "Preemptions by what became of the blocks",
        {
            ("swap",): stats.swap_preemptions_total,
            ("recompute",): stats.preemptions_total - stats.swap_preemptions_total,
        },
        ("mode",),
    )
    moved: dict[tuple[str, ...], float] = {
        ("out",): stats.swapped_out_blocks_total,
        ("in",): stats.swapped_in_blocks_total,
        ("write_back",): stats.written_back_blocks_total,
    }
    yield _counter("pagekv_swapped_blocks", "Blocks copied between device and host", moved, ("direction",))
    yield _counter(
        "pagekv_swapped_bytes",
        "Bytes copied between device and host",
        {direction: blocks * model.bytes_per_block for direction, blocks in moved.items()},
        ("direction",),
    )
    yield _counter("pagekv_hash_alarms", "Digests that stood for other tokens", {(): stats.hash_alarms_total})


class _Labelled:
    """Makes families with vLLM's labels; without a model, with none."""

    def __init__(self, model_name: str | None) -> None:
        self.names = ["model_name", "engine"] if model_name is not None else []
        self.values = [model_name, "0"] if model_name is not None else []

    def counter(self, name: str, text: str, value: float) -> Metric:
        return _counter(name, text, {tuple(self.values): value}, self.names)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return _gauge(name, text, {tuple(self.values): value}, self.names)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self.names)
        family.add_metric(self.values, histogram.buckets(), histogram.total)
        return family


def _counter(name: str, text: str, values: Values, labels: tuple[str, ...] | list[str] = ()) -> Metric:
    """Its samples are called `name`_total."""
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _gauge(name: str, text: str, values: Values, labels: tuple[str, ...] | list[str] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def metrics_routes(collector: Collector) -> list[web.AbstractRouteDef]:
    """`GET /metrics`, with a registry of its own."""
    registry = CollectorRegistry()
    registry.register(collector)

    async def metrics(request: web.Request) -> web.Response:
        # Never OpenMetrics: prometheus-client would write vllm_ for vllm: to a scraper that asks for no escaping.
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return [web.get("/metrics", metrics)]
