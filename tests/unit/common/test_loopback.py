"""Which addresses are this machine's alone, and the refusal of the others."""

from __future__ import annotations

import pytest

from pagekv.common.flags import FlagParser
from pagekv.common.loopback import is_local, is_loopback, open_to_others, refuse_open


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("localhost.example", False),
        # Names are not looked up.
        ("gpu-7", False),
    ],
)
def test_loopback_names(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/socket", True),
        ("unix:///tmp/socket", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/events", True),
        ("10.0.0.7:1", False),
        ("gpu-7:1", False),
        ("[::]:1", False),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        # gRPC takes several addresses at once, and resolvers by name.
        ("ipv4:127.0.0.1:1,0.0.0.0:2", False),
        ("dns:///127.0.0.1:1", False),
        ("vsock:2:1", False),
    ],
)
def test_local_addresses(address: str, local: bool) -> None:
    assert is_local(address) is local


def test_what_is_open_is_refused_with_the_flag_the_address_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    listeners = {"listen": "localhost:1", "http-listen": "0.0.0.0:2", "events": ""}
    assert open_to_others(listeners) == {"http-listen": "0.0.0.0:2"}
    parser = FlagParser("pagekv-test", "", env={})
    refuse_open(parser, {"listen": "localhost:1", "events": ""})
    with pytest.raises(SystemExit) as caught:
        refuse_open(parser, listeners)
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "pagekv-test: argument --http-listen: other machines could connect to 0.0.0.0:2, without TLS or a login: "
        "listen at a loopback address, such as 127.0.0.1, set up TLS and identities (pagekv certs), or accept that "
        "with --insecure (PAGEKV_INSECURE=on)\n"
        "Try 'pagekv-test --help'.\n"
    )
