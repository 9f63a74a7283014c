"""`pagekv health`, `version` and `model`: the server that answers, and the model that it serves."""

from __future__ import annotations

import argparse

from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.parser import Subparsers, add_command
from pagekv.client.cli.query import Shown, add_query
from pagekv.client.cli.terminal import Terminal, table
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError, Unavailable
from pagekv.common.version import pagekv_version


def add(commands: Subparsers) -> None:
    add_query(commands, "health", "say whether the stack serves; exit status 3 if not", health)
    parser = add_command(commands, "version", "show the versions of client and manager", version)
    add_connection(parser)
    add_query(commands, "model", "show the model served and its limits", model)


def health(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    status = client.health()
    serves = {"target": client.target, "status": status}
    failure = None if status == "serving" else Unavailable(f"PageKV at {client.target} is not serving")
    return Shown(serves, f"{client.target} {status}", failure=failure)


def version(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the client's version, and the manager's version or the reason why it is not known. Exit status 0 in both
    cases.
    """
    server, why = "", ""
    try:
        with connect(args) as client:
            server = client.model_info().server_version
    except PageKVError as error:
        why = str(error)
        if isinstance(error, Unavailable):
            # The error of a manager without an executor has its version.
            server = error.server_version
    if args.json:
        terminal.json({"client": pagekv_version(), "server": server or None})
        return 0
    terminal.print(table([("client", pagekv_version()), ("server", server or "unknown")]))
    if why:
        terminal.note(why)
    return 0


def model(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    info = client.model_info()
    rows = [
        ("model", info.model_id or "none"),
        ("fingerprint", info.model_fingerprint[:16]),
        ("backend", f"{info.backend}, keys and values as {info.kv_dtype}, sampler {info.sampler}"),
        ("features", ", ".join(info.features) or "none"),
        ("context", f"{info.max_model_len} tokens"),
        ("vocabulary", f"{info.vocab_size} tokens, end of text {', '.join(map(str, info.eos_token_ids)) or 'none'}"),
        ("input", "token ids" + ", text" * info.has_tokenizer + ", chat" * info.has_chat_template),
        ("device pool", f"{info.num_device_blocks} blocks of {info.block_size} tokens"),
        ("host pool", f"{info.num_host_blocks} blocks" if info.num_host_blocks else "none"),
    ]
    return Shown(info, table(rows))
