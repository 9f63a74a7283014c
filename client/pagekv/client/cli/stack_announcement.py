"""The output of `pagekv up` once a stack serves: its addresses, and commands to try."""

from __future__ import annotations

import argparse
import os
import shlex

from pagekv.client.channel import DEFAULT_TARGET
from pagekv.client.cli.terminal import Terminal, pagekv_command, printable
from pagekv.client.errors import PermissionDenied, Unauthenticated
from pagekv.client.identity import API_KEY_VARIABLE
from pagekv.client.launcher.child_flags import flag_value, takes_models_tokenizer
from pagekv.client.launcher.own_manager import client_of
from pagekv.client.launcher.stack import Stack
from pagekv.client.types import ModelInfo
from pagekv.common.loopback import is_local
from pagekv.common.models import TOKENIZER


def announce(stack: Stack, args: argparse.Namespace, terminal: Terminal) -> None:
    """Prints it for a person, or with --json for a program. `args` are those of `pagekv up`."""
    info, certificates = _model_info(stack), stack.config.certificates
    # The files for a caller, by the arguments of the client library.
    files = {} if certificates is None else certificates.client_files()
    scheme = "http" if certificates is None else "https"
    # An HTTP address that the manager's own flags set may be for metrics alone.
    served = [] if stack.config.page_port is None else stack.listening("http")
    pages = [f"{scheme}://{_reached_at(stack, address)}/" for address in served]
    events: list[dict[str, str]] = stack.listening("kv_events")
    recordings = [path for paths in stack.listening("recordings") for path in paths]
    listeners = [*stack.targets, *stack.executor_targets, stack.gateway_target, *stack.listening("http")]
    listeners += [endpoint for at in events for endpoint in at.values()]
    reached = [address for address in listeners if address and not is_local(address)]
    if certificates is not None:
        # All others have TLS, or are refused: a manager with identities publishes events on this machine alone.
        reached = [address for address in reached if address == stack.gateway_target]
    if reached:
        terminal.note(f"other machines can connect, without TLS or a login: {', '.join(reached)}")
    with_port = [target for target in stack.executor_targets if not target.startswith("unix:")]
    if stack.config.executor_port is None and with_port:
        terminal.note(
            f"other users of this machine can reach {', '.join(with_port)}, where an executor listens, "
            "because the folder for temporary files cannot have Unix sockets: set TMPDIR to another one"
        )
    openai = f"http://{stack.gateway_target}/v1" if stack.gateway_target else ""
    if args.json:
        found: dict[str, object] = {"target": _reached_at(stack, stack.target), "executor": stack.executor_targets[0]}
        found |= {"openai": openai, "targets": stack.targets} if openai else {}
        found |= {name: str(path) for name, path in files.items()}
        # `page` is the first manager's page, `pages` those of all managers.
        found |= {"page": pages[0], "pages": pages} if pages else {}
        found |= {"kv_events": events} if events else {}
        found |= {"recordings": recordings} if recordings else {}
        terminal.json({**found, "pids": {child.name: child.popen.pid for child in stack.children}})
        return
    where = "" if stack.target == DEFAULT_TARGET else f" --target {_reached_at(stack, stack.target)}"
    where += "".join(f" --{name.replace('_', '-')} {shlex.quote(str(path))}" for name, path in files.items())
    name = pagekv_command()
    if info is None and "client_cert" not in files:
        # The caller needs a key that is in the identities file; this command does not know it.
        name = f"PAGEKV_API_KEY=KEY {name}"
    what = '"In the beginning"' if info is None or info.has_tokenizer else "--token-ids 1,2,3"
    lines = [
        f"PageKV is ready at {terminal.bold(stack.target)}",
        *([] if info is None else [f"  {describe(info, stack.config.ranks)}"]),
        f"  try: {terminal.bold(f'{name} generate{where} {what}')}",
        f"  or:  {name} stats{where}",
    ]
    if openai:
        lines.append(f"  OpenAI endpoint: {terminal.bold(openai)}")
    if len(stack.targets) > 1:
        lines.append(f"  in front of {len(stack.targets)} managers: {', '.join(stack.targets)}")
    if pages:
        if stack.page_moved:
            terminal.note(f"port {args.http_port} is taken, so the page has another one; choose it with --http-port")
        lines.append(f"  watch the blocks: {terminal.bold('  '.join(pages))}")
    for at in events:
        again = f", missed ones at {at['replay_endpoint']}" if at["replay_endpoint"] else ""
        lines.append(f"  KV events at {at['endpoint']}{again}")
    lines += [f"  recording to {path}" for path in recordings]
    if info is not None and _tokenizer_failed(stack, info):
        terminal.note(
            f"only token ids can be served: the manager cannot use the tokenizer of {info.model_id}; --verbose shows "
            "why, and --tokenizer names another"
        )
    terminal.print("\n".join([*lines, "Ctrl-C stops it."]))


def _tokenizer_failed(stack: Stack, info: ModelInfo) -> bool:
    """Whether the model's own tokenizer was wanted and could not be used. False for a directory without one, of which
    `pagekv up` warns before the start.
    """
    if info.has_tokenizer or not info.model_id:
        return False
    if not takes_models_tokenizer(stack.config.manager_args, os.environ):
        return False
    return not os.path.isdir(info.model_id) or os.path.isfile(os.path.join(info.model_id, TOKENIZER))


def describe(info: ModelInfo, ranks: int = 1) -> str:
    """One line about the served model and its pool."""
    over = f" over {ranks} ranks" if ranks > 1 else ""
    tokens = info.num_device_blocks * info.block_size
    return (
        f"model {printable(info.model_id or 'none')}, backend {printable(info.backend)}{over}, "
        f"{info.num_device_blocks} blocks of {info.block_size} tokens ({tokens} tokens of KV cache)"
    )


def _model_info(stack: Stack) -> ModelInfo | None:
    """None if the manager does not know this command as a caller, or does not allow the call."""
    certificates = stack.config.certificates
    shown = os.environ.get(API_KEY_VARIABLE) or (certificates is not None and certificates.mutual)
    if not shown and flag_value("identities", stack.config.manager_args, os.environ):
        # Without a key or a certificate the call would be refused, and be one more line of the audit log.
        return None
    with client_of(stack.target, certificates) as client:
        try:
            return client.model_info()
        except (Unauthenticated, PermissionDenied):
            return None


def _reached_at(stack: Stack, address: str) -> str:
    """The address for a client on this machine: localhost instead of all interfaces, because no certificate names
    those.
    """
    host, _, port = address.rpartition(":")
    return f"localhost:{port}" if stack.config.certificates is not None and host in ("0.0.0.0", "[::]") else address
