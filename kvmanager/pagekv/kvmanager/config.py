"""The manager's flags: `pagekv-manager --help` and docs/flags.md are their documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pagekv.common.flags import FlagParser, add_flags, add_version, address, flag, flag_group, from_args, number
from pagekv.common.logs import LOG_FORMATS, LOG_LEVELS, refusal_in_json
from pagekv.common.loopback import INSECURE_HELP, refuse_open
from pagekv.kvmanager.access.flags import AccessConfig, check_access
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.observe.flags import ObserveConfig

PROG = "pagekv-manager"
# Flags that only the executor has, for the error message if one is given here.
EXECUTOR_FLAGS = (
    "backend", "cuda-graphs", "dtype", "eos", "fused", "join-timeout-s", "kv-dtype", "kv-memory", "manager-name",
    "max-sequences", "memory-share", "model", "rank-timeout-s", "step-time-ms", "threads", "vocab-size",
    "wgmma-prefill",
)  # fmt: skip  # several names a line: one each would fill a screen
# Values of --tokenizer: the tokenizer of the executor's model, or none at all.
FROM_EXECUTOR, NO_TOKENIZER = "auto", "none"


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Checked values."""

    listen: str = flag(
        "address to serve clients on; port 0 takes a free one",
        default="127.0.0.1:50051",
        type=address,
        metavar="HOST:PORT",
    )
    insecure: bool = flag(INSECURE_HELP, default=False)
    # A directory, "demo", a hub id, FROM_EXECUTOR or NO_TOKENIZER.
    tokenizer: str = flag(
        "tokenizer: a directory with tokenizer.json, demo, or a hub id; auto: that of the executor's model; none: "
        "clients send token ids",
        default=FROM_EXECUTOR,
        type=lambda text: text or FROM_EXECUTOR,
        metavar="WHERE",
    )
    grace_s: float = flag(
        "seconds, 0 to 3600, that running streams get to finish on SIGTERM",
        default=30.0,
        type=number(0, 3600),
        metavar="SECONDS",
    )
    log_level: str = flag(
        "lowest level to log; debug adds refused calls, and for each request: queued, computed from here, ended",
        default="info",
        choices=LOG_LEVELS,
    )
    log_format: str = flag("form of the log", default="text", choices=LOG_FORMATS)
    # Empty: no file is written.
    port_file: str = flag(
        "file to write one JSON line to once the process listens: the addresses, and the `phase` of a long start while "
        "it lasts; or `cannot_start` with the reason",
        default="",
        metavar="PATH",
    )
    reflection: bool = flag("let tools such as grpcurl list the services", default=True)
    engine: EngineConfig = field(default_factory=EngineConfig, metadata=flag_group("executor and KV memory"))
    access: AccessConfig = field(default_factory=AccessConfig, metadata=flag_group("identity"))
    observe: ObserveConfig = field(default_factory=ObserveConfig, metadata=flag_group("observability and gateway"))

    def open_listeners(self) -> dict[str, str]:
        """Addresses at which other machines can connect without TLS or a login, by the names of their flags."""
        protected = {"listen": self.listen, "http-listen": self.observe.http_listen}
        return self.access.open_listeners(protected, self.observe.event_endpoints())


def parse_config(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> ManagerConfig:
    """Reads command line and environment; exits with status 2 and one line that names a bad flag and its bounds."""
    parser = FlagParser(
        PROG, "The KV-manager: takes requests, decides what is in the KV cache and drives an executor.", env=env
    )
    parser.error_line = refusal_in_json("kvmanager", argv, env)
    parser.elsewhere = {"pagekv-executor": EXECUTOR_FLAGS}
    add_version(parser)
    add_flags(parser, ManagerConfig)
    config = from_args(ManagerConfig, parser.parse(argv))
    check_access(parser, config.access, config.listen, config.observe.event_endpoints())
    if not config.insecure:
        refuse_open(parser, config.open_listeners())
    # Only the live page shows a block's age.
    return replace(config, engine=replace(config.engine, block_ages=bool(config.observe.http_listen)))
