"""Metrics of TLS and of the gate: the certificate's validity, files and key sets that cannot be used, refused calls,
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
        if access.tls is not None and access.tls.validity is not None:
            for name, words, when in zip(("begin", "end"), ("Beginning", "End"), access.tls.validity, strict=True):
                text = f"{words} of validity of the manager's certificate, in seconds since 1970"
                yield GaugeMetricFamily(f"pagekv_certificate_{name}_seconds", text, when.timestamp())
        if access.files:
            text = "1 while changed files cannot be used; the earlier content stays in force"
            refused_files = GaugeMetricFamily("pagekv_files_refused", text, labels=["files"])
            for files in access.files:
                refused_files.add_metric([files.what], files.are_refused)
            yield refused_files
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
