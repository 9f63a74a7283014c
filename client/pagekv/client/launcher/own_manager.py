"""The manager of a stack that was started here, asked by the command that started it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from pagekv.client.channel import channel_options
from pagekv.client.client import PageKVClient


@contextmanager
def client_of(target: str) -> Iterator[PageKVClient]:
    """A client without TLS, which such a manager has not, whatever files the environment names for other managers."""
    with grpc.insecure_channel(target, options=channel_options(target)) as channel:
        yield PageKVClient(target, channel=channel)
