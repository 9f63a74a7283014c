"""Flags that say who may use the manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagekv.common.flags import FlagParser, flag, flag_group, optional_address
from pagekv.common.loopback import is_local, open_to_others
from pagekv.common.tls_flags import TlsConfig, check_tls


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Checked values. An empty text means that the flag is not set."""

    tls: TlsConfig = field(default_factory=TlsConfig, metadata=flag_group("identity"))
    executor_ca: str = flag(
        "authorities of the executor's certificate (PEM): encrypts the link, on which this manager shows "
        "--executor-cert, or else --tls-cert",
        default="",
        metavar="FILE",
    )
    executor_cert: str = flag(
        "certificate to present to the executor (PEM); default: that of --tls-cert",
        default="",
        metavar="FILE",
        needs="executor-ca",
    )
    executor_key: str = flag(
        "private key of --executor-cert, without a passphrase", default="", metavar="FILE", needs="executor-cert"
    )
    identities: str = flag(
        "identities file (TOML): API keys, client certificates and the issuer of tokens, with the roles of callers; "
        "all others are refused; read again when it changes",
        default="",
        metavar="FILE",
    )
    audit_log: str = flag(
        "file to write a JSON line to for every refused call and every call of an operator",
        default="",
        metavar="FILE",
        needs="identities",
    )

    gateway_listen: str = flag(
        "loopback address, or unix:/path, for a gateway that passes no identity on: serves "
        "vllm.grpc.engine.VllmEngine, where callers without an identity are the [gateway] of --identities (needs "
        "pagekv[gateway])",
        default="",
        type=optional_address,
        metavar="HOST:PORT",
        needs="identities",
    )
    tenants: str = flag(
        "tenants file (TOML): limits of each tenant, and shared namespaces; a tenant without an entry is refused, "
        "unless the file has [default]; read again when it changes",
        default="",
        metavar="FILE",
        needs="identities",
    )
    cluster_secret: str = flag(
        "file with 32 random bytes or more, from which the digests of tenants' blocks are made: the same for all "
        "managers behind a gateway; without it each start draws its own",
        default="",
        metavar="FILE",
        needs="identities",
    )

    @property
    def protected(self) -> bool:
        """Whether gRPC and HTTP are encrypted and let in only known callers."""
        return bool(self.tls.tls_cert and self.identities)

    def open_listeners(self, listeners: Mapping[str, str], events: Mapping[str, str]) -> dict[str, str]:
        """Addresses, by the names of their flags, at which other machines can connect without TLS or a login.
        `listeners`: addresses of gRPC and HTTP. `events`: addresses of ZeroMQ, which has neither TLS nor a login.
        """
        return open_to_others({**({} if self.protected else listeners), **events})


def _same_place(one: str, other: str) -> bool:
    """Whether two addresses of this machine are the same: two listeners of gRPC would share it without an error."""
    if one.startswith("unix:") or other.startswith("unix:"):
        return one.removeprefix("unix:").removeprefix("//") == other.removeprefix("unix:").removeprefix("//")
    port = one.rpartition(":")[2]
    return port != "0" and port == other.rpartition(":")[2]


def check_access(parser: FlagParser, config: AccessConfig, listen: str, events: Mapping[str, str]) -> None:
    """Ends the process with status 2, and one line, if flags contradict each other or lack another flag."""
    check_tls(parser, config.tls)
    if bool(config.executor_cert) != bool(config.executor_key):
        names = ("executor-cert", "executor-key")
        there, missing = names if config.executor_cert else names[::-1]
        parser.error(f"argument --{there}: needs --{missing}, too")
    if config.tls.tls_client_ca and not config.identities:
        parser.error("argument --tls-client-ca: needs --identities, which says what each certificate may do")
    if config.gateway_listen and not config.identities:
        parser.error("argument --gateway-listen: needs --identities, which says what the gateway may do")
    if config.gateway_listen and not is_local(config.gateway_listen):
        words = "must be a loopback address or unix:/path, because whoever connects acts as the gateway, got"
        parser.error(f"argument --gateway-listen: {words} {config.gateway_listen}")
    if config.gateway_listen and _same_place(config.gateway_listen, listen):
        parser.error(
            f"argument --gateway-listen: {config.gateway_listen} is the address of --listen {listen}: choose another"
        )
    for name, endpoint in events.items():
        if config.identities and endpoint and not endpoint.startswith("ipc://"):
            words = "would show all prompts to whoever connects: with --identities use ipc://PATH"
            parser.error(f"argument --{name}: {endpoint} {words}")
