"""The executor's flags: `pagekv-executor --help` is their documentation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagekv.common.flags import FlagParser, address, integer, number, size_in_bytes
from pagekv.common.logs import LOG_FORMATS, LOG_LEVELS

BACKENDS = ("auto", "cpu", "cuda", "oracle")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
KV_DTYPES = ("auto", "fp8")
# --eos: as the model says.
EOS_FROM_MODEL = "auto"


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Checked values; meanings, units and bounds as in `pagekv-executor --help`."""

    listen: str
    backend: str
    # A directory, "demo", a hub id, or empty: no model (oracle only).
    model: str
    dtype: str
    kv_dtype: str
    cuda_graphs: bool
    threads: int
    kv_memory: int
    # None: as the backend thinks best.
    memory_share: float | None
    max_sequences: int
    step_time_ms: float
    token_time_us: float
    vocab_size: int
    max_model_len: int
    # None: as the model says.
    eos_token_ids: tuple[int, ...] | None
    grace_s: float
    log_level: str
    log_format: str
    # Empty: none is written.
    port_file: str
    reflection: bool


def parse_config(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> ExecutorConfig:
    """Reads command line and environment; exits with status 2 and one line that names a bad flag and its bounds."""
    parser = FlagParser(
        "pagekv-executor",
        "The executor: holds the model and the KV memory, and runs the steps that a KV-manager sends.",
        env=env,
    )
    flag = parser.flag
    flag("listen", "address to serve the manager on; port 0 takes a free one", default="127.0.0.1:50052", type=address)
    flag(
        "backend",
        "cuda: runs the model on a GPU; cpu: with torch alone; oracle: no model, checks every KV decision; auto: cuda "
        "where torch finds a GPU and CuPy is installed, else cpu",
        default="auto",
        choices=BACKENDS,
    )
    flag("model", "a model directory, demo, or a hub id; default: demo, with the oracle none", default="")
    flag(
        "dtype",
        "element type of weights and KV memory; auto: float32 (cpu), as the weights are stored (cuda); float16 is for "
        "cuda, float64 for cpu",
        default="auto",
        choices=DTYPES,
    )
    flag("kv-dtype", "element type of KV memory (cuda); auto: as --dtype; fp8: e4m3", default="auto", choices=KV_DTYPES)
    parser.switch("cuda-graphs", "record decode steps as CUDA graphs (cuda)", default=True)
    flag("threads", "compute threads, 0 to 1024 (cpu); 0: one per core", default=0, type=integer(0, 1024))
    flag(
        "kv-memory",
        "memory for the KV pool, such as 512MiB; 0: measured, see --memory-share (oracle: a million slots)",
        default=0,
        type=size_in_bytes(0, 2**50),
    )
    flag(
        "memory-share",
        "share, 0.05 to 0.9, of the memory still available after profiling that the KV pool takes; default: 0.4 (cpu), "
        "0.9 (cuda)",
        default=None,
        type=number(0.05, 0.9),
    )
    flag("max-sequences", "live sequences at most, 1 to 65536", default=1024, type=integer(1, 65536))
    flag(
        "grace-s",
        "seconds, 0 to 3600, that the step under way gets to finish on SIGTERM",
        default=10.0,
        type=number(0, 3600),
    )
    flag("log-level", "what to log at least", default="info", choices=LOG_LEVELS)
    flag("log-format", "how to log", default="text", choices=LOG_FORMATS)
    flag("port-file", "file for a JSON line with the bound address, once listening", default="")
    parser.switch("reflection", "let tools such as grpcurl list the services", default=True)
    _add_oracle_flags(parser)
    args = parser.parse(argv)
    return ExecutorConfig(
        listen=args.listen,
        backend=args.backend,
        model=args.model or ("" if args.backend == "oracle" else "demo"),
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        cuda_graphs=args.cuda_graphs,
        threads=args.threads,
        kv_memory=args.kv_memory,
        memory_share=args.memory_share,
        max_sequences=args.max_sequences,
        step_time_ms=args.step_time_ms,
        token_time_us=args.token_time_us,
        vocab_size=args.vocab_size,
        max_model_len=args.max_model_len,
        eos_token_ids=args.eos,
        grace_s=args.grace_s,
        log_level=args.log_level,
        log_format=args.log_format,
        port_file=args.port_file,
        reflection=args.reflection,
    )


def _add_oracle_flags(parser: FlagParser) -> None:
    flag = parser.flag
    flag("step-time-ms", "oracle: milliseconds a step takes, 0 to 60000", default=0.0, type=number(0, 60_000))
    flag("token-time-us", "oracle: microseconds more per token, 0 to 1000000", default=0.0, type=number(0, 10**6))
    flag("vocab-size", "oracle: token ids; 0: as the model has, else 512", default=0, type=integer(0, 2**31 - 1))
    flag("max-model-len", "oracle: context; 0: as the model has, else 4096", default=0, type=integer(0, 2**31 - 1))
    flag(
        "eos",
        "oracle: end-of-sequence ids such as 0,7, or none; auto: as the model has, else 0",
        default=EOS_FROM_MODEL,
        type=_eos,
    )


def _eos(text: str) -> tuple[int, ...] | None:
    if text == EOS_FROM_MODEL:
        return None
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 11 for part in parts) or len(parts) > 16:
        raise argparse.ArgumentTypeError(f"must be 1 to 16 token ids joined by commas, none, or auto, got {text!r}")
    return tuple(int(part) for part in parts)
