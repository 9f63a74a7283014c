"""The engine loop's configuration and its flags."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagekv.common.flags import address, flag, flag_group, integer, number, power_of_two, zero_or_integer
from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE, POLICIES
from pagekv.kvmanager.scheduling.limits import SchedulerLimits


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Checked values."""

    executor: str = flag(
        "address of the executor to drive", default="127.0.0.1:50052", type=address, metavar="HOST:PORT"
    )
    block_size: int = flag(
        "tokens in one block: a power of two from 1 to 256", default=16, type=power_of_two(1, 256), metavar="TOKENS"
    )
    num_device_blocks: int = flag(
        "blocks in the device pool; 0: as many as fit the memory that the executor measured",
        default=0,
        type=integer(0, 2**30),
        metavar="N",
    )
    num_host_blocks: int = flag(
        "blocks in the host pool, which keeps preempted sequences (unless --preemption recompute) and evicted blocks "
        "(with --write-back); 0: as many as the executor allows",
        default=0,
        type=integer(0, 2**30),
        metavar="N",
    )
    max_model_len: int = flag(
        "most tokens of a prompt and its output together; 0: as many as the model and the size of a step allow",
        default=0,
        # A sequence has a token of prompt and one of output.
        type=zero_or_integer(2, 2**31 - 1),
        metavar="TOKENS",
    )
    # Preempted sequences wait too.
    max_queue: int = flag(
        "most sequences that may wait; further requests are refused", default=1024, type=integer(1, 10**6), metavar="N"
    )
    # Most sequences that have ended and whose readers have not gone; beyond it requests are refused. Four times as many
    # as may wait by default, so that only clients that do not read reach this bound.
    max_unread: int = 4096
    priority_aging: int = flag(
        "0 to 1000000: fewer than this many later requests overtake a waiting one for each level by which their "
        "priority is better, so 1 leaves the order of arrival between neighbouring levels; 0: any number overtake it",
        default=256,
        type=integer(0, 10**6),
        metavar="N",
    )
    pipeline_depth: int = flag("steps sent ahead: 1 or 2", default=2, type=integer(1, 2), metavar="N")
    step_timeout_s: float = flag(
        "seconds, 0.1 to 3600, after which an executor that does not answer a step counts as lost",
        default=60.0,
        type=number(0.1, 3600),
        metavar="SECONDS",
    )
    # Epochs in which a request's step may fail, with no token in between, before the request ends with an error. A
    # request that breaks the executor must not do so for ever, and others in the same step must survive.
    step_attempts: int = 3
    take_over: bool = flag("attach even if another manager drives the executor", default=False)
    eviction_policy: str = flag(
        "order in which cached blocks are evicted; lru: least recently used first; slru: the same, but blocks that "
        "were hit come last",
        default=DEFAULT_POLICY,
        choices=POLICIES,
    )
    # Share of the pool, 0 to 1, that `slru` protects at most.
    protected_share: float = DEFAULT_PROTECTED_SHARE
    max_pinned_share: float = flag(
        "share of the pool, 0 to 1, that PinPrefix may keep from eviction",
        default=0.5,
        type=number(0, 1),
        metavar="SHARE",
    )
    limits: SchedulerLimits = field(default_factory=SchedulerLimits, metadata=flag_group("scheduling"))
    # Record when each block entered the prefix table, for the live page.
    block_ages: bool = False
