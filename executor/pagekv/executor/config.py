"""The executor's flags. `pagekv-executor --help` and docs/flags.md document them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pagekv.common.flags import (
    FlagParser,
    add_flags,
    add_version,
    address,
    flag,
    flag_group,
    from_args,
    integer,
    number,
    size_in_bytes,
    zero_or_integer,
)
from pagekv.common.logs import LOG_FORMATS, LOG_LEVELS, refusal_in_json
from pagekv.common.loopback import INSECURE_HELP, refuse_open
from pagekv.common.tls_flags import TlsConfig, check_tls

PROG = "pagekv-executor"
# Flags that only the manager has, so that the error about one of them here can say so.
MANAGER_FLAGS = (
    "audit-log", "block-size", "cluster-secret", "eviction-policy", "executor", "executor-ca", "executor-cert",
    "executor-key", "fork-sharing", "gateway-api", "gateway-listen", "http-listen", "http-names", "identities",
    "kv-events", "kv-events-endpoint", "kv-events-replay-endpoint", "max-batch-tokens", "max-pinned-share",
    "max-queue", "max-running", "num-device-blocks", "num-host-blocks", "otlp-endpoint", "page-text",
    "partial-hits", "pipeline-depth", "preemption", "prefix-cache", "priority-aging", "record", "record-steps",
    "step-timeout-s", "take-over", "tenants", "tokenizer", "watermark", "write-back",
)  # fmt: skip  # several names a line: one each would fill a screen


def _eos(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 11 for part in parts) or len(parts) > 16:
        raise argparse.ArgumentTypeError(f"must be 1 to 16 token ids joined by commas, none, or auto, got {text!r}")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True, slots=True)
class OracleConfig:
    """The model that the oracle pretends to serve, and how long its steps take."""

    step_time_ms: float = flag(
        "oracle: milliseconds that a step takes, 0 to 60000", default=0.0, type=number(0, 60_000), metavar="MS"
    )
    vocab_size: int = flag(
        "oracle: size of the vocabulary; 0: the model's, without a model 512",
        default=0,
        type=integer(0, 2**31 - 1),
        metavar="N",
    )
    max_model_len: int = flag(
        "oracle: most tokens of a sequence; 0: the model's, without a model 4096",
        default=0,
        # A sequence has a token of prompt and one of output.
        type=zero_or_integer(2, 2**31 - 1),
        metavar="TOKENS",
    )
    # None: from the model.
    eos_token_ids: tuple[int, ...] | None = flag(
        "oracle: end-of-sequence ids such as 0,7, or none; auto: the model's, without a model 0",
        name="eos",
        default="auto",
        type=_eos,
        metavar="IDS",
    )


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The checked values of the executor's flags."""

    listen: str = flag(
        "address to serve the manager on; port 0 takes a free one",
        default="127.0.0.1:50052",
        type=address,
        metavar="HOST:PORT",
    )
    insecure: bool = flag(INSECURE_HELP, default=False)
    backend: str = flag(
        "cuda: the model on a GPU; cpu: the model on CPUs; oracle: no model, checks every KV decision; auto: cuda "
        "if torch finds a GPU and CuPy is installed, else cpu",
        default="auto",
        choices=("auto", "cpu", "cuda", "oracle"),
    )
    # Empty: no model (oracle only).
    model: str = flag(
        "a model directory, demo, or a hub id; default: demo, or no model with the oracle", default="", metavar="NAME"
    )
    dtype: str = flag(
        "element type of weights and KV memory; auto: float32 (cpu), that of the stored weights (cuda); float16 is "
        "for cuda, float64 for cpu",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16", "float64"),
    )
    kv_dtype: str = flag(
        "element type of KV memory (cuda); auto: as --dtype; fp8: e4m3", default="auto", choices=("auto", "fp8")
    )
    cuda_graphs: bool = flag("record decode steps as CUDA graphs (cuda)", default=True)
    fused: bool = flag(
        "compute steps with compiled loops (cpu; for families that the loops do not know, only parts of a step) or "
        "fused layers (cuda), if the logits agree with those of transformers",
        default=True,
    )
    wgmma_prefill: bool = flag(
        "compute prompts with Hopper's matrix instructions (cuda, compute capability 9.0, 16-bit types, KV memory of "
        "the same type, heads of 64 or 128); no GPU has run this yet",
        default=False,
    )
    threads: int = flag(
        "compute threads, 0 to 1024 (cpu); 0: up to one per core, chosen by measured step times",
        default=0,
        type=integer(0, 1024),
        metavar="N",
    )
    kv_memory: int = flag(
        "memory for the KV pool, such as 512MiB; 0: measured, see --memory-share (oracle: a million slots)",
        default=0,
        type=size_in_bytes(0, 2**50),
        metavar="SIZE",
    )
    # None: the backend's default.
    memory_share: float | None = flag(
        "share of the memory left after profiling, 0.05 to 0.9, for the KV pool, if --kv-memory is 0; on CPUs the host "
        "pool takes as much again, both together at most 0.9; default: 0.4 (cpu), 0.9 (cuda)",
        default=None,
        type=number(0.05, 0.9),
        metavar="SHARE",
    )
    max_sequences: int = flag("most live sequences, 1 to 65536", default=1024, type=integer(1, 65536), metavar="N")
    join_timeout_s: float = flag(
        "seconds, 1 to 3600, for the ranks of a group (torchrun) to come together",
        default=300.0,
        type=number(1, 3600),
        metavar="SECONDS",
    )
    rank_timeout_s: float = flag(
        "seconds, 0.5 to 3600, for which a rank may be silent, read nothing or keep others waiting in a step before it "
        "counts as lost; must be less than the manager's --step-timeout-s",
        default=30.0,
        type=number(0.5, 3600),
        metavar="SECONDS",
    )
    grace_s: float = flag(
        "seconds, 0 to 3600, that steps already received, at most two, get to finish on SIGTERM",
        default=10.0,
        type=number(0, 3600),
        metavar="SECONDS",
    )
    log_level: str = flag(
        "lowest level to log; debug adds refused calls, and where a GPU that cannot be used failed",
        default="info",
        choices=LOG_LEVELS,
    )
    log_format: str = flag("form of the log", default="text", choices=LOG_FORMATS)
    # Empty: no file is written.
    port_file: str = flag(
        "file to write one JSON line to once the process listens: the address, and the `phase` of a long start while "
        "it lasts; or `cannot_start` with the reason",
        default="",
        metavar="PATH",
    )
    reflection: bool = flag("let tools such as grpcurl list the services", default=True)
    tls: TlsConfig = field(default_factory=TlsConfig, metadata=flag_group("identity"))
    manager_name: str = flag(
        "common name or DNS name that the manager's certificate must have",
        default="pagekv-manager",
        metavar="NAME",
        needs="tls-client-ca",
    )
    oracle: OracleConfig = field(default_factory=OracleConfig, metadata=flag_group("oracle"))


def refuse_cuda_flags(config: ExecutorConfig) -> None:
    """Raises ValueError for a flag that only the cuda backend supports."""
    if config.kv_dtype != "auto":
        raise ValueError(f"--kv-dtype {config.kv_dtype} needs --backend cuda")
    if config.wgmma_prefill:
        raise ValueError("--wgmma-prefill needs --backend cuda")


def parse_config(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> ExecutorConfig:
    """Reads command line and environment. For a bad flag, exits with status 2 and one line that names the flag and its
    bounds.
    """
    parser = FlagParser(
        PROG, "The executor: holds the model and the KV memory, and runs the steps that a KV-manager sends.", env=env
    )
    parser.error_line = refusal_in_json("executor", argv, env)
    parser.elsewhere = {"pagekv-manager": MANAGER_FLAGS}
    add_version(parser)
    add_flags(parser, ExecutorConfig)
    config = from_args(ExecutorConfig, parser.parse(argv))
    check_tls(parser, config.tls)
    # With mutual TLS only the manager can use the executor, so any address may be served.
    if not config.insecure and not config.tls.tls_client_ca:
        refuse_open(parser, {"listen": config.listen})
    return config if config.model or config.backend == "oracle" else replace(config, model="demo")
