"""Flags of the HTTP port, KV events, recordings and tracing: values that are no plain text."""

from __future__ import annotations

import argparse

import pytest

from pagekv.kvmanager.config import parse_config
from pagekv.kvmanager.observe.flags import ObserveConfig, zmq_endpoint


def test_everything_is_off_by_default() -> None:
    off = parse_config([], {}).observe
    assert off == ObserveConfig()
    assert not any((off.http_listen, off.gateway_api, off.kv_events, off.record, off.record_steps))
    assert (off.otlp_endpoint, off.http_names, off.kv_events_endpoint) == ("", (), "tcp://127.0.0.1:5557")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector/my/path", "http://collector/my/path"),
        ("", ""),
    ],
)
def test_a_collector_without_a_path_gets_the_usual_one(given: str, url: str) -> None:
    assert parse_config(["--otlp-endpoint", given], {}).observe.otlp_endpoint == url


def test_an_endpoint_is_tcp_or_ipc() -> None:
    good = ("", "tcp://*:0", "tcp://[::1]:5557", "ipc:///tmp/events")
    assert [zmq_endpoint(text) for text in good] == [*good]
    for wrong in (
        "tcp://:1",
        "tcp://host",
        "tcp://host:65536",
        "ipc://",
        "udp://host:1",
        "tcp://host:\N{SUPERSCRIPT TWO}",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="must be tcp://host:port"):
            zmq_endpoint(wrong)
