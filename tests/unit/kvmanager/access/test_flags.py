"""Flags of access: what goes together, and which ports are then open to others."""

from __future__ import annotations

import pytest

from pagekv.common.flags import FlagParser
from pagekv.common.tls_flags import TlsConfig
from pagekv.kvmanager.access.flags import AccessConfig, check_access

TLS = TlsConfig("c.pem", "c.key")
MUTUAL = TlsConfig("c.pem", "c.key", "ca.pem")
LISTEN = "127.0.0.1:50051"
EVENTS = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("config", "events"),
    [
        (AccessConfig(), {"kv-events-endpoint": EVENTS}),
        (AccessConfig(TLS, identities="i.toml"), {"kv-events-endpoint": ""}),
        (AccessConfig(MUTUAL, identities="i.toml", audit_log="a"), {"kv-events-endpoint": "ipc:///run/events"}),
        *((AccessConfig(identities="i.toml", gateway_listen=at), {}) for at in ("[::1]:0", "localhost:1", "unix:/g")),
    ],
)
def test_what_goes_together(config: AccessConfig, events: dict[str, str]) -> None:
    check_access(FlagParser("prog", "", env={}), config, LISTEN, events)


@pytest.mark.parametrize(
    ("config", "events", "words"),
    [
        (AccessConfig(TlsConfig(tls_cert="c")), {}, "argument --tls-cert: needs --tls-key, too"),
        # Else a certificate of the authority would let in, whoever has it.
        (AccessConfig(MUTUAL), {}, "argument --tls-client-ca: needs --identities"),
        (
            AccessConfig(TLS, identities="i.toml"),
            {"kv-events-replay-endpoint": EVENTS},
            f"argument --kv-events-replay-endpoint: {EVENTS} would show all prompts to whoever connects",
        ),
        (AccessConfig(identities="i.toml"), {"kv-events-endpoint": "tcp://ipc://x"}, "would show all prompts"),
        (AccessConfig(gateway_listen="127.0.0.1:1"), {}, "argument --gateway-listen: needs --identities"),
        *(
            (
                AccessConfig(TLS, identities="i.toml", gateway_listen=address),
                {},
                f"argument --gateway-listen: must be a loopback address or unix:/path, because whoever connects "
                f"acts as the gateway, got {address}",
            )
            for address in ("0.0.0.0:1", "[::]:1", "gateway.example:1", ":1")
        ),
        (
            AccessConfig(identities="i.toml", gateway_listen="localhost:50051"),
            {},
            f"argument --gateway-listen: localhost:50051 is the address of --listen {LISTEN}: choose another",
        ),
    ],
)
def test_what_does_not_ends_the_process(
    config: AccessConfig, events: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check_access(FlagParser("prog", "", env={}), config, LISTEN, events)
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("config", "protected"),
    [
        (AccessConfig(), False),
        (AccessConfig(TLS), False),
        (AccessConfig(identities="i.toml"), False),
        (AccessConfig(executor_ca="ca.pem"), False),
        (AccessConfig(TLS, identities="i.toml"), True),
    ],
)
def test_only_tls_and_identities_together_protect_a_port(config: AccessConfig, protected: bool) -> None:
    listeners, events = {"listen": "0.0.0.0:1", "http-listen": "127.0.0.1:2"}, {"kv-events-endpoint": "tcp://*:3"}
    reached = config.open_listeners(listeners, events)
    # Listeners of events have no login in any case.
    assert set(reached) == {"kv-events-endpoint"} | (set() if protected else {"listen"})
    assert config.protected == protected
