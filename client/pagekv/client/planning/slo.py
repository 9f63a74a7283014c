"""Where to look when answers come too late: a request against objectives for its first token and for those after it.

The first token waits for the queue and the prompt, the others for the steps that they share with everybody: two
latencies with two causes, so one average of both tells nothing (CHECKLIST H8, K6).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Diagnosis(Enum):
    """What a request's latencies point to; the first that applies, for a late first token delays what follows."""

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
