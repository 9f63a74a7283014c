"""Real processes seen from outside: metrics as a real Prometheus scrapes them, spans as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.clients.otlp_collector import collector
from support.clients.plain_text import plain_text
from support.clients.stack import ORACLE, ROOT, running_stack

from pagekv.client import AsyncPageKVClient, Stats

T = TypeVar("T")

pytestmark = pytest.mark.e2e

OBSERVE = ROOT / "kvmanager" / "observe"
PROMPT = list(range(100, 180))
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


SERVING_HTTP = ("--http-listen", "127.0.0.1:0")


async def generate(target: str, count: int, **metadata: str) -> Stats:
    """So many requests with one prompt, and what GetStats says after them."""
    async with AsyncPageKVClient(target, metadata=metadata.items()) as client:
        for _ in range(count):
            await client.generate(PROMPT, max_tokens=8, ignore_eos=True)
        return await client.stats()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as response:
        return str(response.read().decode())


@plain_text
def test_metrics_agree_with_stats_and_spans_with_the_call() -> None:
    with collector() as spans:
        with running_stack(ORACLE, [*SERVING_HTTP, "--otlp-endpoint", spans.url]) as stack:
            stats = asyncio.run(generate(stack.target, 3, traceparent=f"00-{TRACE}-{SPAN}-01"))
            families = text_string_to_metric_families(get(f"http://{stack.manager.http}/metrics"))
            values = {sample.name: sample.value for family in families for sample in family.samples}
            assert stack.manager.stop() == 0
        assert values["vllm:prefix_cache_queries_total"] == stats.prompt_tokens_total == 3 * len(PROMPT)
        assert values["vllm:prefix_cache_hits_total"] == stats.cached_tokens_total == 2 * (len(PROMPT) - 1)
        assert values["vllm:generation_tokens_total"] == stats.generated_tokens_total == 24
        assert values["vllm:e2e_request_latency_seconds_count"] == stats.requests_total == 3
        assert values["pagekv_step_seconds_count"] == stats.steps_total
        # Spans queued at SIGTERM have been sent.
        roots = [span for span in spans.spans if span.name == "generate"]
        assert len(roots) == 3
        for root in roots:
            assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
            below = {span.name for span in spans.spans if span.parent_span_id == root.span_id}
            assert below == {"queued", "prefill chunk", "decode"}


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """Debian's, with our rules, scraping the target; the URL of its API."""
    program = shutil.which("prometheus")
    if program is None and "CI" not in os.environ:
        pytest.skip("a scrape by Prometheus needs it: apt-get install prometheus")
    assert program is not None, "prometheus is not installed"
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "200ms"},
        "rule_files": [str(OBSERVE / "rules.yml")],
        "scrape_configs": [{"job_name": "pagekv", "static_configs": [{"targets": [target]}]}],
    }
    (directory / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
    command = [program, "--config.file", str(directory / "prometheus.json"), "--web.listen-address", "127.0.0.1:0"]
    command += ["--storage.tsdb.path", str(directory / "data"), "--log.format", "json"]
    path = directory / "prometheus.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://{until(lambda: bound_address(path))}"
        until(lambda: is_ready(url))
        yield f"{url}/api/v1"
    finally:
        process.terminate()
        process.wait(240)


def bound_address(log: Path) -> str:
    """The address that the log says Prometheus listens on; empty before that."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return next((str(line["address"]) for line in lines if line.get("msg") == "Listening on"), "")


def is_ready(url: str) -> bool:
    """Whether it answers queries yet."""
    try:
        return bool(get(f"{url}/-/ready"))
    except urllib.error.HTTPError:
        return False


def until(look: Callable[[], T], what: str = "it") -> T:
    """The first answer that is not empty."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} never came true")


def query(api: str, expression: str) -> dict[str, float]:
    """An instant vector: values by their label sets, as JSON."""
    answer = json.loads(get(f"{api}/query?{urllib.parse.urlencode({'query': expression})}"))
    return {
        json.dumps(series["metric"], sort_keys=True): float(series["value"][1]) for series in answer["data"]["result"]
    }


@pytest.mark.long
def test_prometheus_scrapes_it_and_the_dashboard_has_something_to_show(tmp_path: Path) -> None:
    """The real Prometheus with our rules: every query of the dashboard is answered."""
    # Prometheus is given no certificate and no key, so it is asked for none, also under PAGEKV_TEST_TLS.
    with running_stack([*ORACLE, "--insecure"], [*SERVING_HTTP, "--insecure"]) as stack:
        target = stack.manager.http
        with prometheus(tmp_path, target) as api:
            until(lambda: query(api, "pagekv_executor_attached == 1"))
            stats = asyncio.run(generate(stack.target, 3))
            total = f"vllm:prefix_cache_queries_total == {stats.prompt_tokens_total}"
            (series,) = until(lambda: query(api, total))
            assert json.loads(series) | {"model_name": "demo", "engine": "0", "job": "pagekv"} == json.loads(series)
            until(lambda: query(api, "pagekv:prefix_hit_ratio > 0.6"))
            dashboard = json.loads((OBSERVE / "grafana" / "dashboards" / "pagekv.json").read_text())
            for panel in dashboard["panels"]:
                for asked in panel["targets"]:
                    expression = asked["expr"].replace("$__rate_interval", "1m").replace("$instance", target)
                    # A rate wants two scrapes.
                    until(lambda asked=expression: query(api, asked), f"{panel['title']}: {expression}")  # type: ignore[misc]  # a lambda with a default
            alerts = json.loads(get(f"{api}/alerts"))["data"]["alerts"]
            # A busy machine may make rules true for a moment; none stays true for as long as it must to fire.
            assert not [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]
            stack.executor.kill()
            until(lambda: query(api, 'ALERTS{alertname="PageKVExecutorLost"}'))
