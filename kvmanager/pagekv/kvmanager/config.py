"""The manager's flags: `pagekv-manager --help` is their documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagekv.common.flags import FlagParser, address, integer, number, power_of_two
from pagekv.common.logs import LOG_FORMATS, LOG_LEVELS
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE, POLICIES
from pagekv.kvmanager.observe import flags as observe_config
from pagekv.kvmanager.observe.flags import ObserveConfig
from pagekv.kvmanager.scheduling.running_queue import SchedulerLimits
from pagekv.kvmanager.scheduling.swapping import MODES, SwapPolicy

# --tokenizer: as the executor's model has it, or none at all.
FROM_EXECUTOR, NO_TOKENIZER = "auto", "none"


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Checked values; meanings and bounds as in `pagekv-manager --help`."""

    listen: str
    # A directory, "demo", a hub id, FROM_EXECUTOR or NO_TOKENIZER.
    tokenizer: str
    grace_s: float
    log_level: str
    log_format: str
    # Empty: none is written.
    port_file: str
    reflection: bool
    observe: ObserveConfig
    engine: EngineConfig


def parse_config(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> ManagerConfig:
    """Reads command line and environment; exits with status 2 and one line that names a bad flag and its bounds."""
    parser = FlagParser(
        "pagekv-manager",
        "The KV-manager: takes requests, decides what is in the KV cache and drives an executor.",
        env=env,
    )
    flag, switch = parser.flag, parser.switch
    flag(
        "listen",
        "address to serve clients on; port 0 takes a free one",
        default="127.0.0.1:50051",
        type=address,
        metavar="HOST:PORT",
    )
    flag("executor", "address of the executor to drive", default="127.0.0.1:50052", type=address, metavar="HOST:PORT")
    flag(
        "tokenizer",
        "where the tokenizer is: a directory with tokenizer.json, demo, or a hub id; auto: where the executor's model "
        "is; none: clients send token ids",
        default=FROM_EXECUTOR,
        metavar="WHERE",
    )
    flag(
        "block-size",
        "tokens in one block: a power of two from 1 to 256",
        default=16,
        type=power_of_two(1, 256),
        metavar="TOKENS",
    )
    flag(
        "num-device-blocks",
        "blocks in the device pool; 0: as many as fit what the executor measured",
        default=0,
        type=integer(0, 2**31 - 1),
        metavar="N",
    )
    flag(
        "num-host-blocks",
        "blocks in the host pool, which takes what preempted sequences had; 0: as many as the executor allows",
        default=0,
        type=integer(0, 2**31 - 1),
        metavar="N",
    )
    flag(
        "preemption",
        "what becomes of the blocks of preempted sequences; swap: copied to the host pool; recompute: dropped and "
        "computed again; auto: what costs less by the executor's measurements",
        default="auto",
        choices=MODES,
    )
    flag(
        "preemption-limit",
        "preemptions, 0 to 1000000, after which a request is no longer the first choice when another has to give its "
        "blocks back",
        default=3,
        type=integer(0, 10**6),
        metavar="N",
    )
    switch(
        "write-back",
        "blocks that the device evicts go to the host pool and serve later hits from there (with --prefix-cache)",
        default=False,
    )
    flag(
        "max-batch-tokens",
        "tokens computed in one step at most",
        default=2048,
        type=integer(1, 65536),
        metavar="TOKENS",
    )
    flag("max-running", "sequences that take part in steps at most", default=256, type=integer(1, 65536), metavar="N")
    flag(
        "max-queue", "sequences that wait at most; more are refused", default=1024, type=integer(1, 10**6), metavar="N"
    )
    flag(
        "max-unread",
        "sequences that have ended and are not read to their end at most; requests are refused beyond",
        default=4096,
        type=integer(1, 10**6),
        metavar="N",
    )
    flag(
        "max-model-len",
        "tokens of prompt and output together; 0: as the model allows",
        default=0,
        type=integer(0, 2**31 - 1),
        metavar="TOKENS",
    )
    flag(
        "watermark",
        "share of the pool, 0 to 0.5, that new requests leave free for running ones to grow",
        default=0.01,
        type=number(0, 0.5),
        metavar="SHARE",
    )
    switch("prefix-cache", "reuse the blocks of equal prompt prefixes", default=True)
    switch(
        "partial-hits",
        "also reuse the beginning of a cached block, by copying it (with --prefix-cache)",
        default=True,
    )
    switch(
        "fork-sharing",
        "the sequences of one request (n, beam_width) share blocks, whatever --prefix-cache says of other requests",
        default=True,
    )
    flag(
        "priority-aging",
        "0 to 1000000: fewer later requests than this pass a waiting one for each level of priority they are ahead; "
        "0: any number",
        default=256,
        type=integer(0, 10**6),
        metavar="N",
    )
    flag(
        "eviction-policy",
        "which cached blocks go first; lru: the least recently used; slru: the same, but those that were hit after "
        "those that were not",
        default=DEFAULT_POLICY,
        choices=POLICIES,
    )
    flag(
        "protected-share",
        "share of the pool, 0 to 1, that slru keeps at most for blocks that were hit",
        default=DEFAULT_PROTECTED_SHARE,
        type=number(0, 1),
        metavar="SHARE",
    )
    flag(
        "max-pinned-share",
        "share of the pool, 0 to 1, that PinPrefix may keep from eviction",
        default=0.5,
        type=number(0, 1),
        metavar="SHARE",
    )
    flag("pipeline-depth", "steps sent ahead: 1 or 2", default=2, type=integer(1, 2), metavar="N")
    flag(
        "step-timeout-s",
        "seconds, 0.1 to 3600, after which an executor that does not answer a step counts as lost",
        default=60.0,
        type=number(0.1, 3600),
        metavar="SECONDS",
    )
    flag(
        "step-attempts",
        "epochs, 1 to 1000, that a request's step may fail in, with no token in between, before the request ends with "
        "an error; an executor that is gone without a word counts a quarter",
        default=3,
        type=integer(1, 1000),
        metavar="N",
    )
    switch("take-over", "attach even while another manager drives the executor", default=False)
    flag(
        "grace-s",
        "seconds, 0 to 3600, that running streams get to finish on SIGTERM",
        default=30.0,
        type=number(0, 3600),
        metavar="SECONDS",
    )
    flag("log-level", "what to log at least", default="info", choices=LOG_LEVELS)
    flag("log-format", "how to log", default="text", choices=LOG_FORMATS)
    flag(
        "port-file",
        "file for a JSON line with the bound addresses, once listening",
        default="",
        metavar="PATH",
    )
    switch("reflection", "let tools such as grpcurl list the services", default=True)
    observe_config.add_flags(parser)
    args = parser.parse(argv)
    if args.tokenizer == "":
        args.tokenizer = FROM_EXECUTOR
    observe = observe_config.from_args(args)
    return ManagerConfig(
        listen=args.listen,
        tokenizer=args.tokenizer,
        grace_s=args.grace_s,
        log_level=args.log_level,
        log_format=args.log_format,
        port_file=args.port_file,
        reflection=args.reflection,
        observe=observe,
        engine=EngineConfig(
            executor=args.executor,
            block_size=args.block_size,
            num_device_blocks=args.num_device_blocks,
            num_host_blocks=args.num_host_blocks,
            max_model_len=args.max_model_len,
            max_queue=args.max_queue,
            max_unread=args.max_unread,
            priority_aging=args.priority_aging,
            pipeline_depth=args.pipeline_depth,
            step_timeout_s=args.step_timeout_s,
            step_attempts=args.step_attempts,
            take_over=args.take_over,
            eviction_policy=args.eviction_policy,
            protected_share=args.protected_share,
            max_pinned_share=args.max_pinned_share,
            limits=SchedulerLimits(
                max_batch_tokens=args.max_batch_tokens,
                max_running=args.max_running,
                watermark=args.watermark,
                prefix_cache=args.prefix_cache,
                partial_hits=args.partial_hits,
                fork_sharing=args.fork_sharing,
                swap=SwapPolicy(args.preemption),
                write_back=args.write_back,
                preemption_limit=args.preemption_limit,
            ),
            block_ages=observe.serves_page,
        ),
    )
