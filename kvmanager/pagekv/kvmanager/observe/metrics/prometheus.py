"""`GET /metrics` for Prometheus. docs/metrics.md says what each metric means and when to worry.

Counters and gauges are read from the engine at a scrape, so they cost a step nothing. `RequestMetrics` keeps the
histograms. If vLLM has a metric with the same meaning, its name and labels are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from pagekv.common.errors import Unavailable
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.observe.metrics.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from pagekv.v1.operator_service_pb2 import GetStatsResponse

# One value; or the name of a label, and a metric value for each value of the label.
Values = float | tuple[str, Mapping[str, float]]


# Upper bounds of the classes of blocks by their number of holders; one more class is for blocks beyond the last bound.
_HOLDERS = (1, 2, 4, 8, 16, 32, 64)


def _by_holders(ref_counts: NDArray[np.int32]) -> dict[str, float]:
    """Numbers of held blocks by their number of holders: 1, 2, 3-4 and so on, and more than the last bound."""
    held = ref_counts[ref_counts > 0]
    counts = np.bincount(np.searchsorted(_HOLDERS, held), minlength=len(_HOLDERS) + 1).tolist()
    lows = [1, *(bound + 1 for bound in _HOLDERS)]
    names = [str(low) if low == high else f"{low}-{high}" for low, high in zip(lows, _HOLDERS, strict=False)]
    return dict(zip([*names, f"{lows[-1]}-"], counts, strict=True))


def _family(name: str, text: str, values: Values, common: Mapping[str, str]) -> Metric:
    """A counter if the name ends with _total, else a gauge; `common` are labels that all samples have."""
    label, by_label = values if isinstance(values, tuple) else ("", {"": values})
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=[*common, label] if label else [*common])
    for of, value in by_label.items():
        family.add_metric([*common.values(), of] if label else [*common.values()], value)
    return family


class EngineCollector(Collector):
    """Used on the event loop, between two steps."""

    def __init__(
        self, engine: EngineLoop, requests: RequestMetrics, *, prefix_cache: bool, insecure_listeners: int = 0
    ) -> None:
        """`requests` observes the engine. `prefix_cache`: whether prompts are looked up at all. `insecure_listeners`:
        ports at which other machines can connect without TLS or a login.
        """
        self._insecure_listeners = insecure_listeners
        self._engine = engine
        self._requests = requests
        self._prefix_cache = prefix_cache

    def collect(self) -> Iterator[Metric]:
        model = self._engine.model
        try:
            stats = self._engine.statistics.stats()
        except Unavailable:
            stats = None
        attached = stats is not None and stats.executor_attached
        yield _family("pagekv_executor_attached", "1 while an executor is attached, else 0", attached, {})
        text = "Ports of this manager at which other machines can connect, without TLS or a login"
        yield _family("pagekv_insecure_listeners", text, self._insecure_listeners, {})
        if model is None or stats is None:
            return
        model_name = model.model_id or model.backend
        vllm = {"model_name": model_name, "engine": "0"}
        for name, text, values in self._values(stats, model):
            yield _family(name, text, values, vllm if name.startswith("vllm:") else {})
        for histogram in self._requests.histograms:
            common = vllm if histogram.name.startswith("vllm:") else {}
            family = HistogramMetricFamily(histogram.name, histogram.text, labels=[*common])
            family.add_metric([*common.values()], histogram.buckets(), histogram.total)
            yield family
        info = {"model_name": model_name, "backend": model.backend, "block_size": str(model.block_size)}
        yield _family("pagekv_info", "Always 1; what is served", 1, info)

    def _values(self, stats: GetStatsResponse, model: EngineInfo) -> list[tuple[str, str, Values]]:
        """Name, help and values of every counter and gauge."""
        looked_up = self._prefix_cache

        def tiers(device: int, host: int) -> Values:
            return "tier", {"device": device, "host": host}

        moved = {
            "out": stats.swapped_out_blocks_total,
            "in": stats.swapped_in_blocks_total,
            "write_back": stats.written_back_blocks_total,
        }
        moved_bytes = {way: blocks * model.bytes_per_block for way, blocks in moved.items()}
        reasons = ("never_seen", "evicted", "cleared", "diverged", "partial_tail")
        misses = {reason: getattr(stats, f"misses_{reason}_total") for reason in reasons}
        swaps = stats.swap_preemptions_total
        preemptions = {"swap": swaps, "recompute": stats.preemptions_total - swaps}
        held = stats.host_held_blocks
        return [
            # Metrics of vLLM, with the same meaning.
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache",
             stats.prompt_tokens_total * looked_up),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache",
             stats.cached_tokens_total * looked_up),
            ("vllm:num_preemptions_total", "Preemptions", stats.preemptions_total),
            ("vllm:prompt_tokens_total", "Prompt tokens of admitted requests", stats.prompt_tokens_total),
            ("vllm:generation_tokens_total", "Tokens generated", stats.generated_tokens_total),
            ("vllm:kv_cache_usage_perc", "Held blocks / blocks of the device pool, 0 to 1", stats.kv_usage),
            ("vllm:num_requests_running", "Sequences that hold blocks", stats.running_sequences),
            ("vllm:num_requests_waiting", "Sequences that wait for blocks", stats.waiting_sequences),
            ("vllm:request_success_total", "Sequences that ended, by reason",
             ("finished_reason", self._requests.finished)),
            ("pagekv_pool_blocks", "Blocks", tiers(stats.num_device_blocks, stats.num_host_blocks)),
            ("pagekv_free_blocks", "Blocks held by nobody, cached ones included",
             tiers(stats.free_blocks, stats.num_host_blocks - held)),
            ("pagekv_active_blocks", "Blocks held by sequences or pins", tiers(stats.active_blocks, held)),
            ("pagekv_held_blocks", "Blocks of the device by how many hold them",
             ("holders", _by_holders(self._engine.statistics.ref_counts()))),
            ("pagekv_promised_blocks", "Blocks that running sequences need at their maximum lengths",
             self._engine.statistics.promised_blocks()),
            ("pagekv_cached_blocks", "Blocks that a prompt can hit, held ones included",
             tiers(stats.published_blocks, stats.host_cached_blocks)),
            ("pagekv_cached_free_blocks", "Cached blocks held by nobody",
             ("tier", {"device": stats.cached_free_blocks})),
            ("pagekv_pinned_blocks", "Blocks under a pin", ("tier", {"device": stats.pinned_blocks})),
            ("pagekv_pins", "Pins", stats.pins),
            ("pagekv_watchers", "Readers of WatchEvents", stats.watchers),
            ("pagekv_unread_sequences", "Ended sequences of calls whose answers are not read to the end",
             stats.unread_sequences),
            ("pagekv_slot_utilization", "Filled slots / slots of held blocks, 0 to 1", stats.utilization),
            ("pagekv_prompt_blocks_total", "Blocks of admitted prompts", stats.prompt_blocks_total),
            ("pagekv_prompt_blocks_cached_total", "Hit blocks of admitted prompts", stats.cached_blocks_total),
            ("pagekv_adapter_prompt_tokens_total", "Prompt tokens of admitted requests",
             ("adapter", self._requests.prompts)),
            ("pagekv_adapter_cached_tokens_total", "Prompt tokens of admitted requests found in the prefix cache",
             ("adapter", self._requests.cached)),
            ("pagekv_prefix_misses_total", "Prompts by the reason of their first miss", ("reason", misses)),
            ("pagekv_evicted_blocks_total", "Cached blocks evicted",
             tiers(stats.evicted_blocks_total, stats.host_evicted_blocks_total)),
            ("pagekv_preemptions_total", "Preemptions by what was done with the blocks", ("mode", preemptions)),
            ("pagekv_swapped_blocks_total", "Blocks copied between device and host", ("direction", moved)),
            ("pagekv_swapped_bytes_total", "Bytes copied between device and host", ("direction", moved_bytes)),
            ("pagekv_hash_alarms_total", "Digests that stood for other tokens", stats.hash_alarms_total),
            ("pagekv_computed_tokens_total", "Tokens computed", stats.computed_tokens_total),
            ("pagekv_executor_busy_seconds_total", "Seconds in steps", stats.executor_busy_us_total * 1e-6),
            ("pagekv_executor_idle_seconds_total", "Seconds between steps while there was work",
             stats.executor_idle_us_total * 1e-6),
            ("pagekv_executor_threads", "Threads of the executor's latest step; 0: unknown", stats.executor_threads),
            ("pagekv_executor_rank_step_seconds", "Work of each rank on a step, without waiting for others",
             ("rank", {str(rank): us / 1e6 for rank, us in enumerate(stats.executor_rank_us)})),
            ("pagekv_executor_rank_differences_total", "Epochs that ended because ranks differed",
             stats.executor_rank_differences_total),
            ("pagekv_executor_graphs", "Shapes of steps, by whether they were recorded as CUDA graphs",
             ("outcome", {"recorded": stats.executor_graphs, "failed": stats.executor_failed_graphs})),
            ("pagekv_executor_restarts_total", "Epochs after the first", stats.executor_restarts_total),
            ("pagekv_requests_total", "Requests accepted", stats.requests_total),
            ("pagekv_requests_aborted_total", "Requests aborted", stats.aborted_requests_total),
            ("pagekv_requests_rejected_total",
             "Requests refused because too many wait (--max-queue), too many answers are unread, or their tenant has "
             "used up tokens_per_minute or max_waiting",
             stats.rejected_requests_total),
            ("pagekv_requests_failed_total", "Requests that the executor could not continue",
             stats.failed_requests_total),
        ]  # fmt: skip  # laid out as a table


def metrics_routes(*collectors: Collector) -> list[web.AbstractRouteDef]:
    """`GET /metrics`, with a registry of its own."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)

    async def metrics(request: web.Request) -> web.Response:
        # Never OpenMetrics: prometheus-client would write vllm_ for vllm: to a scraper that asks for no escaping.
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return [web.get("/metrics", metrics)]
