"""A client for the manager of a stack, for the command that started the stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from pagekv.client.channel import channel_options
from pagekv.client.client import PageKVClient
from pagekv.client.launcher.certificates import CLIENT, MANAGER, PROBE, StackCertificates, server_name


@contextmanager
def client_of(target: str, certificates: StackCertificates | None = None) -> Iterator[PageKVClient]:
    """A client with the stack's own certificate, or without TLS; files that the environment names are ignored."""
    # A proxy that the environment names cannot reach every address of this machine.
    options = [*channel_options(target), ("grpc.enable_http_proxy", 0)]
    if certificates is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        role = CLIENT if certificates.mutual else PROBE
        options.append(("grpc.ssl_target_name_override", server_name(MANAGER)))
        channel = grpc.secure_channel(target, certificates.credentials(role), options=options)
    with channel:
        yield PageKVClient(target, channel=channel)
