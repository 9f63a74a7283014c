"""Settings of the scheduler: bounds of a step and of admission, and the fate of preempted and evicted blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.common.flags import flag, flag_metadata, integer, number
from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.kvmanager.scheduling.encoded_sizes import IdBytes
from pagekv.kvmanager.scheduling.swapping import MODES, SwapPolicy


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of admission."""

    max_batch_tokens: int = flag(
        "most tokens that one step computes", default=2048, type=integer(1, 65536), metavar="TOKENS"
    )
    max_running: int = flag(
        "most sequences that run at a time; fewer if the executor's --max-sequences is lower",
        default=256,
        type=integer(1, 65536),
        metavar="N",
    )
    watermark: float = flag(
        "share of the pool, 0 to 0.5, that new requests leave free for running ones to grow",
        default=0.01,
        type=number(0, 0.5),
        metavar="SHARE",
    )
    prefix_cache: bool = flag("reuse the blocks of equal prompt prefixes", default=True)
    partial_hits: bool = flag(
        "also reuse the beginning of a cached block, by copying the block", default=True, needs="prefix-cache"
    )
    fork_sharing: bool = flag(
        "share blocks among the sequences of one request (n, beam_width), with or without --prefix-cache",
        default=True,
    )
    swap: SwapPolicy = field(
        default_factory=SwapPolicy,
        metadata=flag_metadata(
            "what becomes of the blocks of preempted sequences; swap: copied to the host pool; recompute: dropped and "
            "computed again; auto: what costs less by the executor's measurements",
            name="preemption",
            default="auto",
            make=SwapPolicy,
            choices=MODES,
        ),
    )
    write_back: bool = flag(
        "copy blocks that the device evicts to the host pool, where later prompts find them",
        default=False,
        needs="prefix-cache",
    )
    # After so many preemptions a request is spared while another victim can be found. Low enough that no request is
    # starved by others; high enough that the latest request, which has computed least, is preempted first.
    preemption_limit: int = 3
    # Most bytes of a step that the executor accepts (P13 in executor_service.proto), and of its ids.
    max_step_bytes: int = MAX_RECEIVE_BYTES
    id_bytes: IdBytes = field(default_factory=IdBytes)

    @property
    def uses_host(self) -> bool:
        """Whether blocks can ever be kept in the host pool."""
        return self.write_back or self.swap.mode != "recompute"
