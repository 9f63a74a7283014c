"""`pagekv certs`: a private certificate authority and the certificates for a first deployment with TLS."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

from pagekv.client.cli.identities_file import IDENTITIES, ROLES, add_certificate
from pagekv.client.cli.parser import Subparsers, UsageError, add_command
from pagekv.client.cli.terminal import Terminal
from pagekv.client.launcher.certificates import CLIENT, server_name
from pagekv.common.flags import integer
from pagekv.common.loopback import ip_address

EXAMPLES = """\
  pagekv certs certificates
  pagekv certs certificates --name gpu-7.example.org --name 10.0.0.7
  pagekv certs certificates --days 90       again: other certificates of the same authority
"""
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# The last label of a host name is never a number. So a mistyped IP address does not pass for a name.
_HOST = re.compile(rf"(?:{_LABEL}\.)*(?!\d+$){_LABEL}")


def add(commands: Subparsers) -> None:
    help = "make a private authority and certificates, or renew these"
    parser = add_command(commands, "certs", help, run, examples=EXAMPLES)
    parser.add_argument("directory", type=_directory, metavar="DIR", help="directory for the files; created if missing")
    parser.add_argument(
        "--name",
        type=_host,
        action="append",
        default=[],
        dest="names",
        metavar="HOST",
        help="further host name or IP address for the certificates of manager and executor, besides localhost and "
        "those of compose.yaml; may be given repeatedly; names of earlier runs are kept",
    )
    parser.add_argument(
        "--days",
        type=integer(1, 3650),
        default=365,
        metavar="N",
        help="days for which the certificates are valid, 1 to 3650 [365]",
    )


def _directory(text: str) -> Path:
    if not text:
        # An empty text usually comes from an unset shell variable: the keys would be written into the current
        # directory.
        raise argparse.ArgumentTypeError("must be the path of a directory, is empty")
    return Path(text)


def _host(text: str) -> str:
    if found := ip_address(text):
        return str(found)
    if len(text) > 253 or not _HOST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a host's name or an IP address, without a port, got {text!r}")
    return text


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Raises PageKVError if files cannot be written, or if the existing authority must not sign."""
    try:
        from pagekv.client.cli import private_authority as pki
    except ImportError as error:
        raise UsageError("pagekv certs needs cryptography: pip install 'pagekv[serve]'") from error
    directory: Path = args.directory
    pki.make_directory(directory)
    authority, written = pki.authority_in(directory)
    ends = {"ca": authority.certificate.not_valid_after_utc}
    for role in pki.ROLES:
        ends[role.name], files = pki.issue(directory, role, authority, args.days, args.names)
        written += files
    identities = directory / IDENTITIES
    if not os.path.exists(identities):
        add_certificate(identities, CLIENT, f"CN={server_name(CLIENT)}", ROLES)
        written.append(identities)
    commands = _commands(directory)
    if args.json:
        found = {"directory": str(directory), "written": list(map(str, written)), "ends": ends, "commands": commands}
        terminal.json(found)
        return 0
    terminal.print(f"wrote {', '.join(path.name for path in written)} in {directory}")
    for name, end in ends.items():
        terminal.print(f"  {name:8} valid until {end:%Y-%m-%d}")
    terminal.print("start both:")
    terminal.print(f"  {shlex.join(['pagekv', 'up', '--certs', str(directory)])}")
    terminal.print(
        "or each process by itself (on separate machines: both with --listen, the manager also with --executor):"
    )
    for name in ("executor", "manager"):
        terminal.print(f"  {commands[name]}")
    terminal.print(f"and send a request:\n  {commands['client']}")
    terminal.note("anybody who has ca.key can impersonate every caller: keep it where no process of PageKV runs.")
    return 0


def _commands(directory: Path) -> dict[str, str]:
    """Command lines for a shell that use these files, with all processes on this machine."""

    def line(*words: str) -> str:
        return shlex.join(str(directory / word) if word.endswith((".pem", ".key", ".toml")) else word for word in words)

    def server(role: str) -> tuple[str, ...]:
        return "--tls-cert", f"{role}.pem", "--tls-key", f"{role}.key", "--tls-client-ca", "ca.pem"

    caller = ("--ca", "ca.pem", "--client-cert", "client.pem", "--client-key", "client.key")
    known = ("--executor-ca", "ca.pem", "--identities", IDENTITIES)
    return {
        "executor": line("pagekv-executor", *server("executor")),
        "manager": line("pagekv-manager", *server("manager"), *known),
        "client": line("pagekv", "health", *caller),
    }
