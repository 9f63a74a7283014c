"""Addresses that only this machine can reach, and the refusal to listen at any other address without TLS and a login,
because everybody who reaches such a port could use all of it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagekv.common.flags import FlagParser

# Help of every flag --insecure.
INSECURE_HELP = (
    "also listen where other machines can connect without TLS or a login; by default only loopback addresses and Unix "
    "sockets are accepted"
)


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`host` as an IP address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether this name or address, without brackets, can only mean this machine. Names other than localhost are not
    looked up, because they may have another address by the time they are used.
    """
    address = ip_address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def is_local(address: str) -> bool:
    """Whether an address (host:port, tcp://host:port, unix:/path or ipc://path) is on loopback or a Unix socket."""
    if address.startswith(("unix:", "ipc://")):
        return True
    return is_loopback(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))


def authority_options(address: str) -> list[tuple[str, str]]:
    """Options of a channel to an address (host:port or unix:/path). A server behind a Unix socket is asked for as
    localhost, a name that certificates can have. gRPC would ask for its path.
    """
    return [("grpc.default_authority", "localhost")] if address.startswith("unix:") else []


def open_to_others(listeners: Mapping[str, str]) -> dict[str, str]:
    """The listeners that other machines can reach: addresses by the names of their flags. An empty address is none."""
    return {name: address for name, address in listeners.items() if address and not is_local(address)}


def open_words(address: str) -> str:
    """The sentence, without a full stop, that refuses an address that other machines can reach."""
    return (
        f"other machines could connect to {address}, without TLS or a login: listen at a loopback address, such as "
        "127.0.0.1, set up TLS and identities (pagekv certs), or accept that with --insecure (PAGEKV_INSECURE=on)"
    )


def refuse_open(parser: FlagParser, listeners: Mapping[str, str]) -> None:
    """Ends the process with status 2, and one line that names the flag, if other machines can reach a listener."""
    for name, address in open_to_others(listeners).items():
        parser.error(f"argument --{name}: {open_words(address)}")
