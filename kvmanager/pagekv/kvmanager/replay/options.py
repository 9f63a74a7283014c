"""The checked options of one replay, and the cost of a simulated step: linear in the tokens it computes and reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.common.flags import flag, flag_group, integer, number
from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE, EvictionOrder
from pagekv.kvmanager.kvcache.eviction_policy import POLICIES as EVICTION_POLICIES
from pagekv.kvmanager.scheduling.limits import SchedulerLimits

# Values of --policy: an eviction policy of the pool, or `none`, which switches the prefix cache off.
NO_CACHE = "none"
POLICIES = (*EVICTION_POLICIES, NO_CACHE)
MODES = ("timed", "cache")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of a step's time. The defaults are not measured: they follow from a data sheet for a dense 8B model
    in bfloat16 on one 80 GB accelerator (about 400 TFLOP/s, 3 TB/s, 128 KiB of KV per token). Fit them to your own
    executor.
    """

    # Reading the weights once, and launching the step.
    step_ms: float = flag(
        "milliseconds of a step that computes anything", default=6.0, type=number(0, 1e6), metavar="MS"
    )
    prefill_us: float = flag(
        "microseconds for each computed prompt token", default=40.0, type=number(0, 1e6), metavar="US"
    )
    # A sequence that computes its last known token: sampling, and its row through the layers.
    decode_us: float = flag(
        "microseconds for each sequence that decodes", default=20.0, type=number(0, 1e6), metavar="US"
    )
    # For each position whose keys and values the step reads.
    kv_read_ns: float = flag(
        "nanoseconds for each token of context read", default=45.0, type=number(0, 1e6), metavar="NS"
    )

    def seconds(self, prefill_tokens: int, decodes: int, kv_tokens: int) -> float:
        """Duration of a step, in seconds; 0 if it computes nothing."""
        if prefill_tokens + decodes == 0:
            return 0.0
        return (
            self.step_ms * 1e-3
            + prefill_tokens * self.prefill_us * 1e-6
            + decodes * self.decode_us * 1e-6
            + kv_tokens * self.kv_read_ns * 1e-9
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOptions:
    """Options that only timed mode has."""

    speed: float = flag(
        "how many times as fast requests arrive as in the trace", default=1.0, type=number(1e-6, 1e6), metavar="X"
    )
    max_batch_tokens: int = flag(
        "most tokens that one step computes", default=2048, type=integer(1, 65536), metavar="TOKENS"
    )
    max_running: int = flag("most sequences that run at a time", default=256, type=integer(1, 65536), metavar="N")
    watermark: float = flag(
        "share of the pool, 0 to 0.5, that admission leaves free", default=0.01, type=number(0, 0.5), metavar="SHARE"
    )
    pipeline_depth: int = flag("steps planned ahead, 1 or 2", default=2, type=integer(1, 2), metavar="N")
    cost: StepCost = field(
        default_factory=StepCost,
        metadata=flag_group(
            "cost of a simulated step, a sum (defaults: an 8B model in bfloat16 on an 80 GB accelerator, by data sheet)"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(TimedOptions):
    """Options that are the same for every row of a report."""

    block_size: int
    # Prompt tokens that one hash id of the workload trace stands for.
    tokens_per_id: int
    # Cache mode: a partial last block of a prompt counts, too, and is cached, because the trace has an id for it.
    partial_blocks: bool
    # Share of the pool, 0 to 1, that `slru` protects at most.
    protected_share: float = DEFAULT_PROTECTED_SHARE

    def limits(self, policy: str) -> SchedulerLimits:
        return SchedulerLimits(self.max_batch_tokens, self.max_running, self.watermark, policy != NO_CACHE)

    def order(self, policy: str, num_blocks: int) -> EvictionOrder:
        """The eviction order of a policy; without the prefix cache any order will do."""
        return EvictionOrder(num_blocks, DEFAULT_POLICY if policy == NO_CACHE else policy, self.protected_share)
