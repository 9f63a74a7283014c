"""Flags of the commands that call a manager: its address, and the credentials.

A flag overrides its environment variable, and the variable overrides the configuration file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

from pagekv.client.aio import AsyncPageKVClient
from pagekv.client.channel import DEFAULT_TARGET
from pagekv.client.cli.config_file import config_path, read_config
from pagekv.client.cli.parser import CommandParser, UsageError
from pagekv.client.client import PageKVClient
from pagekv.client.errors import InvalidRequest
from pagekv.client.identity import API_KEY_VARIABLE, FILE_VARIABLES
from pagekv.client.settings import DEFAULT_TIMEOUT_S
from pagekv.common.flags import address, number

# Flags with a value that may stand before the command, too.
VALUE_FLAGS = ("--target", "--timeout", "--api-key", "--act-for", "--ca", "--client-cert", "--client-key")
_VARIABLES = {"api_key": API_KEY_VARIABLE, **FILE_VARIABLES}
_HELP = {
    "api_key": "API key to send; other users of this machine can read command lines, so rather set PAGEKV_API_KEY, or "
    "api_key in ~/.config/pagekv/config.toml",
    "act_for": "tenant to call for, if the caller has the role act-for",
    "ca": "for TLS: PEM file of the authority that signed the manager's certificate, or PAGEKV_CA",
    "client_cert": "for TLS: PEM file of the certificate to present, or PAGEKV_CLIENT_CERT",
    "client_key": "PEM file of the key of --client-cert, or PAGEKV_CLIENT_KEY",
}

Client = TypeVar("Client", PageKVClient, AsyncPageKVClient)


def add_connection(parser: CommandParser, *, timeout: str | None = f"seconds to wait [{DEFAULT_TIMEOUT_S:g}]") -> None:
    """--target and the flags of identity, and --timeout with its help unless that is None."""
    # None: the value comes from the configuration file.
    parser.flag(
        "target",
        f"address of the PageKV manager, or PAGEKV_TARGET [{DEFAULT_TARGET}]",
        default=None,
        type=address,
        metavar="HOST:PORT",
    )
    if timeout is None:
        parser.set_defaults(timeout=None)
    else:
        parser.add_argument("--timeout", type=number(0.001, 1e6), metavar="S", help=timeout)
    for name, help in _HELP.items():
        # Not with `flag`, because its help shows the value of the variable, which may be a key.
        metavar = {"api_key": "KEY", "act_for": "TENANT"}.get(name, "FILE")
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=help)


def connect(args: argparse.Namespace) -> PageKVClient:
    """The blocking client that the flags describe. It does not retry: scripts branch on the exit status, and people see
    the reason. Raises UsageError.
    """
    return client_of_flags(PageKVClient, args, timeout=args.timeout or DEFAULT_TIMEOUT_S, max_retries=0)


def client_of_flags(make: Callable[..., Client], args: argparse.Namespace, **options: Any) -> Client:
    """A client, made by `make` from flags, variables and file. Raises UsageError, which names the source of a wrong
    value.
    """
    path = config_path(os.environ)
    in_file = read_config(path)
    if "target" in in_file:
        try:
            address(in_file["target"])
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{path}: target: {error}") from error
        if args.target not in (None, in_file["target"]):
            # The file is for another manager: its key must not be sent elsewhere.
            in_file = {}
    # There is no variable and no key of the file for `act_for`: the tenant is named with each call.
    given: dict[str, str] = {} if args.act_for is None else {"act_for": args.act_for}
    sources: dict[str, str] = {"act_for": "--act-for"}
    for name, variable in _VARIABLES.items():
        for source, value in (
            (f"--{name.replace('_', '-')}", getattr(args, name)),
            # A variable that is empty is none, as in the client library.
            (variable, os.environ.get(variable) or None),
            (f"{path}: {name}", in_file.get(name)),
        ):
            if value is not None:
                given[name], sources[name] = value, source
                break
    try:
        return make(args.target or in_file.get("target", DEFAULT_TARGET), **given, **options)
    except InvalidRequest as error:
        if error.field not in sources:
            raise
        raise UsageError(f"{sources[error.field]}: {error.description}") from error
