"""Metrics of TLS and of the gate: the certificate's expiry, files and key sets that could not be used, refused calls,
lost lines of the audit log.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pagekv.kvmanager.access.opening import Access


class AccessCollector(Collector):
    """Metrics only of the parts that flags turn on."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def collect(self) -> Iterator[Metric]:
        access = self._access
        if access.tls is not None and access.tls.not_after is not None:
            text = "End of validity of the manager's certificate, in seconds since 1970"
            yield GaugeMetricFamily("pagekv_certificate_end_seconds", text, access.tls.not_after.timestamp())
        if access.files:
            text = "Changes of files that could not be used; the earlier content stays in force"
            failures = CounterMetricFamily("pagekv_reload_failures", text, labels=["files"])
            for files in access.files:
                failures.add_metric([files.what], files.failures)
            yield failures
        if access.gate is not None:
            refused = CounterMetricFamily("pagekv_refused_calls", "Refused calls, by reason", labels=["reason"])
            for reason, count in access.gate.refusals.items():
                refused.add_metric([reason], count)
            yield refused
            text = "Failed attempts to read the key set of tokens; the earlier set stays in force"
            yield CounterMetricFamily("pagekv_key_set_failures", text, access.gate.authenticator.refresh_failures)
            if access.gate.audit_log is not None:
                text = "Lines of the audit log that could not be written"
                yield CounterMetricFamily("pagekv_lost_audit_lines", text, access.gate.audit_log.lost_lines)
