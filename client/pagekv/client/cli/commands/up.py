"""`pagekv up`: the whole stack on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pagekv.client.cli.identities_file import GATEWAY, IDENTITIES, ListedIdentity, list_identities
from pagekv.client.cli.parser import CommandParser, Subparsers, UsageError, add_command, add_flags
from pagekv.client.cli.stack_announcement import announce
from pagekv.client.cli.terminal import Terminal
from pagekv.client.errors import InvalidRequest, PageKVError
from pagekv.client.launcher.certificates import StackCertificates
from pagekv.client.launcher.child_flags import (
    flag_value,
    is_bare_oracle,
    takes_models_tokenizer,
    tokenizer_name,
    vocabulary_args,
)
from pagekv.client.launcher.gateway import DEFAULT_PORT, POLICIES, GatewayConfig
from pagekv.client.launcher.stack import LOOPBACK, Stack, StackConfig
from pagekv.client.launcher.stop_signals import StopSignals
from pagekv.common.extras import missing_modules, missing_words
from pagekv.common.flags import integer, is_true, listening_host, number, variable_of
from pagekv.common.logs import is_error
from pagekv.common.loopback import INSECURE_HELP, is_local, open_words
from pagekv.common.models import CONFIG, DEMO, TOKENIZER

EXAMPLES = """\
  pagekv up
  pagekv up --model ~/models/Qwen3-0.6B --dtype bfloat16 --port 6000
  pagekv up --backend oracle --block-size 32 --http-port 8081
  pagekv up --tp 2 --threads 1              # one model over two ranks
  pagekv up --gateway                       # also an OpenAI endpoint, http://127.0.0.1:8000/v1
  pagekv up --replicas 3 --policy cache_aware --threads 1 --kv-memory 256MiB
  pagekv up --executor-args="--threads 2" --manager-args="--max-queue 64"
  pagekv certs certificates && pagekv up --certs certificates        # TLS, and callers who are known
"""
# Other names of the command: vLLM and ollama have `serve`.
ALIASES = ("serve",)
# Flags that are passed to a process if they are given; for all other flags the processes read PAGEKV_* variables.
_TO_EXECUTOR = ("model", "backend", "dtype", "threads", "kv-memory")
_TO_MANAGER = ("block-size", "num-device-blocks", "max-model-len", "max-queue", "tokenizer")
# Flags of the processes that are not among their other flags, because `up` sets them.
_ADDRESSES = {
    "executor_args": ("--listen", "--executor"),
    "manager_args": ("--listen", "--executor", "--gateway-listen"),
    "gateway_args": ("--host", "--prometheus-host"),
}
# Modules that the manager imports for its HTTP port; the extra `observe` brings them.
HTTP_NEEDS = ("aiohttp", "prometheus_client")
_ACCEPT = "allow other machines to use it with --insecure"
# Seconds between two progress lines of one phase of the start.
_PROGRESS_S = 5.0
# Seconds between two checks of the processes.
_WATCH_S = 0.2


def add(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "up",
        "start an executor and a KV-manager here, and stop both on Ctrl-C",
        run,
        examples=EXAMPLES,
        aliases=ALIASES,
    )
    port = integer(0, 65535)
    words = "address that manager, page and gateway listen on"
    parser.flag("host", words, default="127.0.0.1", type=listening_host, metavar="HOST")
    parser.flag("insecure", INSECURE_HELP, default=False)
    words = "port for clients; 0 takes a free one; with --replicas the port of the first manager"
    parser.flag("port", words, default=50051, type=port, metavar="PORT")
    words = "port of the executor on 127.0.0.1; 0 takes a free one [none: a Unix socket that only this user can open]"
    parser.flag("executor-port", words, default=None, type=port, metavar="PORT")
    group = parser.add_argument_group("the live page (pip install 'pagekv[observe]')")
    either = group.add_mutually_exclusive_group()
    words = "port of the page and of Prometheus metrics; if it is 0 or taken, a free one [8080]"
    add_flags(either, ("http-port", port, 8080, "PORT", words))
    either.add_argument("--no-http", action="store_true", help="serve neither page nor metrics")
    group = parser.add_argument_group("OpenAI endpoint and replicas (the gateway smg: pip install 'pagekv[gateway]')")
    group.add_argument("--gateway", action="store_true", help="start a gateway that speaks OpenAI's HTTP API, too")
    add_flags(
        group,
        ("gateway-port", port, None, "PORT", "port of the gateway; 0 takes a free one [8000]"),
        ("replicas", integer(1, 64), 1, "N",
         "pairs of executor and KV-manager behind the gateway; more than 1 implies --gateway [1]"),
        ("gateway-args", _words, None, "ARGS", "any other flags of the gateway (smg launch --help), quoted"),
    )  # fmt: skip  # laid out as a table
    group.add_argument("--policy", choices=POLICIES, help=f"how the gateway chooses a pair [{POLICIES[0]}]")
    group = parser.add_argument_group("identity (see pagekv certs, pagekv keys)")
    add_flags(
        group,
        ("certs", Path, None, "DIR",
         "TLS on every port, with the files of pagekv certs DIR; the executor serves only its manager"),
        ("identities", Path, None, "FILE",
         "identities file: callers, and what each may do; if it identifies any by certificate, every caller must "
         "present one [with --certs: identities.toml in DIR]"),
    )  # fmt: skip  # laid out as a table
    add_stack_flags(parser)


def add_stack_flags(parser: CommandParser) -> None:
    """The flags that `up` and `demo` share."""
    group = parser.add_argument_group("model and memory (see pagekv-executor --help, pagekv-manager --help)")
    add_flags(
        group,
        ("model", str, None, "NAME", "a model directory, a hub id, or demo [demo]"),
        ("backend", str, None, "NAME", "cpu, cuda, oracle or auto [auto]"),
        ("dtype", str, None, "TYPE", "element type of weights and KV memory"),
        ("threads", str, None, "N", "compute threads"),
        ("kv-memory", str, None, "SIZE", "memory for the KV pool, such as 512MiB"),
        ("block-size", str, None, "N", "tokens in one block"),
        ("num-device-blocks", str, None, "N", "blocks in the device pool"),
        ("max-model-len", str, None, "N", "tokens of prompt and output together"),
        ("max-queue", str, None, "N", "most sequences that may wait"),
        ("tokenizer", str, None, "NAME", "tokenizer: a directory, a hub id, or demo [the model's]"),
        ("executor-args", _words, [], "ARGS", "any other flags of the executor, quoted"),
        ("manager-args", _words, [], "ARGS", "any other flags of the KV-manager, quoted"),
    )
    words = "split the model over N ranks on this machine (pip install 'pagekv[ranks]') [1]"
    add_flags(group, ("tp", integer(1, 64), 1, "N", words))
    parser.add_argument("--verbose", action="store_true", help="show the logs of both processes, not only errors")
    add_flags(
        parser,
        ("start-timeout", number(1, 86400), 600.0, "S", "seconds within which all processes must be ready [600]"),
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text!r}") from error


def stack_config(args: argparse.Namespace, terminal: Terminal) -> StackConfig:
    """The stack that the flags describe. Raises UsageError if they do not fit together, a package is missing, or a file
    of certificates or callers cannot be read.
    """
    _check_addresses(args)
    _check_packages(args)
    gateway = _gateway(args)
    executor_args, manager_args = _process_args(args)
    identities = flag_value("identities", manager_args, os.environ)
    certificates = None if args.certs is None else _certificates(args.certs, identities)
    if identities:
        _callers(identities)
    if gateway is not None:
        _check_gateway(args, executor_args, manager_args, identities)
        manager_args.insert(0, f"--gateway-listen={LOOPBACK}:0" if identities else "--gateway-api")
    return StackConfig(
        page_port=_page_port(args, terminal),
        host=args.host,
        port=args.port,
        executor_port=args.executor_port,
        executor_args=[*executor_args, *vocabulary_args(executor_args, manager_args, os.environ)],
        replicas=args.replicas,
        ranks=args.tp,
        gateway=gateway,
        manager_args=manager_args,
        certificates=certificates,
        on_log=partial(_show_line, terminal) if args.verbose else None,
    )


def _check_addresses(args: argparse.Namespace) -> None:
    """Raises UsageError if --manager-args or --executor-args set an address, or if other machines could connect without
    --insecure.
    """
    for name, flags in _ADDRESSES.items():
        if any(word.partition("=")[0] in flags for word in getattr(args, name) or ()):
            raise UsageError(f"--{name.replace('_', '-')}: set addresses with --host, --port and --executor-port")
    if not args.insecure and args.certs is None and not is_local(f"{args.host}:{args.port}"):
        raise UsageError(f"--host: {open_words(args.host)}")


def _check_packages(args: argparse.Namespace) -> None:
    """Raises UsageError if modules are missing that a process needs to start."""
    backend = args.backend or flag_value("backend", args.executor_args, os.environ)
    if missing := missing_modules("manager", *([] if backend == "oracle" else ["executor"])):
        raise UsageError(missing_words("serve", missing))
    if args.tp > 1 and find_spec("torch") is None:
        raise UsageError("--tp needs torchrun, which comes with torch: pip install 'pagekv[serve,ranks]'")


def _process_args(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The flags of executors and of managers. Raises UsageError if the user's flags set TLS files."""
    # Without --insecure the processes need no flag, unless --no-insecure was given and the variable says otherwise.
    insecure = ["--insecure"] if args.insecure else []
    if args.insecure is False and is_true(os.environ.get(variable_of("insecure"), "")):
        insecure = ["--no-insecure"]
    identities: Path | None = args.identities
    if args.certs is not None and flag_value("identities", args.manager_args, os.environ) is None:
        identities = identities or args.certs / IDENTITIES

    def given(names: tuple[str, ...]) -> list[str]:
        values = [(name, getattr(args, name.replace("-", "_"))) for name in names]
        return [f"--{name}={value}" for name, value in values if value is not None]

    known = [] if identities is None else [f"--identities={identities}"]
    # Without the flag the manager would read the variable.
    http = ["--http-listen="] if args.no_http else []
    executor_args = [*insecure, *given(_TO_EXECUTOR), *args.executor_args]
    manager_args = [*insecure, *given(_TO_MANAGER), *known, *http, *args.manager_args]
    # With --certs the processes get flags, which override variables.
    tls_env = {} if args.certs is not None else os.environ
    if any(flag_value("tls-cert", each, tls_env) for each in (executor_args, manager_args)):
        raise UsageError("--tls-cert (PAGEKV_TLS_CERT): not with this command; pagekv up has --certs DIR instead")
    return executor_args, manager_args


def _callers(identities: str) -> list[ListedIdentity]:
    """The callers in the identities file. Raises UsageError if it cannot be read."""
    try:
        return list_identities(Path(identities))
    except PageKVError as error:
        absent = isinstance(error.__cause__, FileNotFoundError)
        remedy = "; pagekv keys add and pagekv certs make such a file" if absent else ""
        raise UsageError(f"--identities {error}{remedy}") from error


def _check_gateway(
    args: argparse.Namespace, executor_args: list[str], manager_args: list[str], identities: str | None
) -> None:
    """Raises UsageError if the gateway would have no identity, would lend its identity to other machines, or would find
    no tokenizer.
    """
    if identities:
        if not any(each.kind == GATEWAY for each in _callers(identities)):
            raise UsageError(
                f"--gateway: the gateway passes no identity on; give it one with a table [{GATEWAY}] in {identities}"
            )
        if not args.insecure and not is_local(f"{args.host}:{args.port}"):
            raise UsageError(
                f"--gateway: the gateway has neither TLS nor a login: leave --host at loopback, or {_ACCEPT}"
            )
    if words := oracle_without_tokenizer(executor_args, manager_args):
        raise UsageError(f"--gateway needs {words}")


def _certificates(directory: Path, identities: str | None) -> StackCertificates:
    """The certificates of the stack. Callers have to present certificates if the identities file identifies any caller
    by certificate: a port asks all callers or none. Raises UsageError if a file cannot be used.
    """
    found = StackCertificates(directory, mutual=False)
    try:
        found.check()
        if identities and any(each.kind == "certificate" for each in _callers(identities)):
            found = StackCertificates(directory, mutual=True)
            found.check()
    except InvalidRequest as error:
        raise UsageError(f"--certs: {error.description}; pagekv certs {directory} makes what is missing") from error
    return found


def oracle_without_tokenizer(executor_args: Sequence[str], manager_args: Sequence[str]) -> str:
    """Words about the tokenizer that an oracle without a model lacks; else empty."""
    if not is_bare_oracle(executor_args, os.environ) or tokenizer_name(manager_args, os.environ) is not None:
        return ""
    return (
        "a tokenizer, and --backend oracle has none: add --tokenizer demo, or --model demo to use its vocabulary and "
        "context too"
    )


def without_tokenizer(config: StackConfig) -> str:
    """A warning if the model directory has no tokenizer and no flag names one; else empty."""
    model = flag_value("model", config.executor_args, os.environ)
    directory = Path(os.path.expanduser(model or DEMO))
    # Without a config.json it is no model directory, which the executor will say.
    if not model or model == DEMO or not os.path.isfile(directory / CONFIG) or (directory / TOKENIZER).is_file():
        return ""
    if not takes_models_tokenizer(config.manager_args, os.environ):
        return ""
    return f"{directory} has no {TOKENIZER}, so only token ids can be served; name a tokenizer with --tokenizer"


def _gateway(args: argparse.Namespace) -> GatewayConfig | None:
    """The gateway, None without one. Raises UsageError if flags are for a gateway that is not requested."""
    if args.gateway or args.replicas > 1:
        # None: not given.
        port = DEFAULT_PORT if args.gateway_port is None else args.gateway_port
        return GatewayConfig(port, args.policy or POLICIES[0], args.gateway_args or ())
    for name in ("gateway_port", "policy", "gateway_args"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: has no effect without --gateway, or --replicas 2 or more")
    return None


def _page_port(args: argparse.Namespace, terminal: Terminal) -> int | None:
    """Port for the live page; None for no page, or if the manager's own flags or variables set its HTTP address."""
    if args.no_http or flag_value("http-listen", args.manager_args, os.environ) is not None:
        return None
    if missing := [name for name in HTTP_NEEDS if find_spec(name) is None]:
        terminal.note(f"no live page: it needs {' and '.join(missing)}: pip install 'pagekv[serve]'")
        return None
    port: int = args.http_port
    return port


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Runs until a signal (exit status 0). Raises StackError when no process is left that serves."""
    config = stack_config(args, terminal)
    if words := without_tokenizer(config):
        if config.gateway is not None:
            raise UsageError(f"--gateway needs a tokenizer: {words}")
        terminal.note(words)
    serving = threading.Event()

    def show_error(process: str, line: str) -> None:
        """Shows errors of running servers, for example about a changed file. A start that fails has its own report."""
        if serving.is_set() and is_error(line):
            _show_line(terminal, process, line)

    stack = Stack(config if args.verbose else replace(config, on_log=show_error))
    with StopSignals(stack) as signals, stack:
        stack.start()
        try:
            if wait_ready(stack, args, terminal, signals.wait):
                serving.set()
                announce(stack, args, terminal)
                while not signals.wait(_WATCH_S):
                    for report in stack.new_deaths():
                        terminal.note(f"{report}\nthe other pairs go on")
        except OSError:
            # A terminal that is closed takes no more words, and its signal may come a moment later.
            if not signals.wait(_WATCH_S):
                raise
        terminal.last_note("stopping: running streams may finish (Ctrl-C again kills)")
    if not args.json:
        terminal.last_note("stopped")
    return 0


def _show_line(terminal: Terminal, process: str, line: str) -> None:
    terminal.note(f"{process:8} | {line}")


def wait_ready(
    stack: Stack, args: argparse.Namespace, terminal: Terminal, pause: Callable[[float], object] = time.sleep
) -> bool:
    """Waits until the stack is ready and prints the phases of its start, with the seconds since the start. `pause` and
    the result are as in `Stack.wait_ready`. Raises StackError.
    """
    begun = time.monotonic()
    said: dict[tuple[str, str], float] = {}

    def say(text: str) -> None:
        if not args.json:
            terminal.note(f"{time.monotonic() - begun:7.1f} s  {text}")

    def show(name: str, waited_s: float) -> None:
        words = f"waiting for the {name}"
        for process, part, percent in stack.phases():
            words = f"{process}: {part}"
            first = (process, part) not in said
            if percent is not None:
                words += f", {percent} %"
            # A pipe has no status line, so progress is printed as lines, but only a few.
            if first or (
                percent is not None and not terminal.err_is_terminal and waited_s - said[process, part] >= _PROGRESS_S
            ):
                said[process, part] = waited_s
                say(words)
        terminal.status(f"{waited_s:7.1f} s  {words}")

    say("starting the executor and the KV-manager")
    ready = stack.wait_ready(args.start_timeout, pause, show)
    terminal.clear()
    if ready:
        say("ready")
    return ready
