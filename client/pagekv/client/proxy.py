"""The proxy through which gRPC connects to other machines, as the environment names it."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress

from pagekv.common.loopback import ip_address, is_local

# gRPC's variables for a proxy, and for the hosts that are called without it. Of each the first that is set counts, also
# if it is empty. A proxy has to begin with http://.
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
DIRECT_VARIABLES = ("no_grpc_proxy", "no_proxy")


def proxy_variable(target: str) -> str:
    """The environment variable whose proxy gRPC connects through to reach `target`; empty if it connects directly."""
    if is_local(target):
        return ""
    host = target.rpartition(":")[0].strip("[]")
    direct = next((os.environ[name] for name in DIRECT_VARIABLES if name in os.environ), "")
    if any(_is_of(host, entry.strip()) for entry in direct.split(",")):
        return ""
    variable = next((name for name in PROXY_VARIABLES if name in os.environ), "")
    return variable if os.environ.get(variable, "").startswith("http://") else ""


def _is_of(host: str, entry: str) -> bool:
    """Whether an entry of no_proxy means this host: a network, or the end of a name."""
    address = ip_address(host)
    if address is not None and "/" in entry:
        with suppress(ValueError):
            return address in ipaddress.ip_network(entry, strict=False)
    return bool(entry) and host.lower().endswith(entry.lower())
