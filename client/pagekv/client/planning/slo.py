"""Latency objectives for the first token and for later ones, and the likely cause where a request misses them.

The first token waits for the queue and the prompt, later ones for steps shared with other requests: two latencies with
two causes, so one average over both tells nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Diagnosis(Enum):
    """The likely cause of a request's latencies; the first that applies, since a late first token delays the rest."""

    PREFILL = "prefill, admission or chunking"
    DECODE = "decode pressure or KV budget"
    WITHIN = "within objectives"


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper bounds in milliseconds, which themselves are within."""

    ttft_ms: float = 500.0
    inter_token_ms: float = 50.0

    def diagnose(self, ttft_ms: float, inter_token_ms: float) -> Diagnosis:
        """`inter_token_ms` is the mean of one request; 0 when it had one token."""
        if ttft_ms > self.ttft_ms:
            return Diagnosis.PREFILL
        if inter_token_ms > self.inter_token_ms:
            return Diagnosis.DECODE
        return Diagnosis.WITHIN


DEFAULT_OBJECTIVES = Objectives()
