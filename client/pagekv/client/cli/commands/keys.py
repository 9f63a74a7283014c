"""`pagekv keys`: API keys of callers, in the file that the manager reads with --identities."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from pagekv.client.cli.identities_file import ACT_FOR, ROLES, add_key, is_name, list_identities
from pagekv.client.cli.parser import Subparsers, add_command
from pagekv.client.cli.terminal import Terminal, table

EXAMPLES = """\
  pagekv keys add alice --role generate --file identities.toml
  PAGEKV_API_KEY=$(pagekv keys add grafana --role observe --file identities.toml)
  pagekv keys list --file identities.toml
"""
# Makes a key recognisable in logs and in searches of repositories.
_PREFIX = "pkv_"
_RANDOM_BYTES = 32


def add(commands: Subparsers) -> None:
    # `list_` never runs for `keys` itself, because a subcommand is required.
    parser = add_command(commands, "keys", "make and list API keys of callers", list_, examples=EXAMPLES)
    own = parser.add_subparsers(prog="pagekv keys", metavar="add|list", required=True)
    adding = add_command(own, "add", "make a key for a caller and print it, this once", add_)
    adding.add_argument("name", type=_name, metavar="NAME", help="name of the caller in logs and metrics")
    adding.add_argument(
        "--role",
        action="append",
        required=True,
        choices=ROLES,
        dest="roles",
        help="what the caller may do: generate, and ask about its own prompts; observe: read statistics and metrics; "
        "operate: see and change what belongs to all callers; may be given repeatedly",
    )
    adding.add_argument("--tenant", type=_name, metavar="NAME", help="tenant of the caller [NAME]")
    adding.add_argument(
        "--act-for",
        action="append",
        default=[],
        type=lambda text: text if text == "*" else _name(text),
        metavar="TENANT",
        help="another tenant for which the caller may act, or * for any; adds the role act-for; may be given "
        "repeatedly",
    )
    listing = add_command(own, "list", "list callers, their tenants and roles", list_)
    for each in (adding, listing):
        each.add_argument("--file", type=Path, required=True, metavar="FILE", help="identities file of the manager")


def _name(text: str) -> str:
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"must be 1 to 64 letters, digits, _ and -, with no - first, got {text!r}")
    return text


def add_(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the key only once the file has its hash. Raises PageKVError."""
    roles = [role for role in ROLES if role in args.roles] + ([ACT_FOR] if args.act_for else [])
    key = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    add_key(args.file, args.name, key, roles, args.tenant or "", args.act_for)
    if args.json:
        terminal.json({"name": args.name, "roles": roles, "key": key})
        return 0
    terminal.print(key)
    terminal.note(
        f"This is the key of {args.name} ({', '.join(roles)}). It is not shown again: {args.file} has only its "
        "SHA-256. The caller sets PAGEKV_API_KEY to the key."
    )
    return 0


def list_(args: argparse.Namespace, terminal: Terminal) -> int:
    found = list_identities(args.file)
    if args.json:
        terminal.json({"identities": [each._asdict() for each in found]})
    elif found:
        rows = [(each.name, each.kind, each.tenant, ", ".join(each.roles)) for each in found]
        terminal.print(table(rows, ("name", "kind", "tenant", "roles")))
    else:
        terminal.print("no callers")
    return 0
