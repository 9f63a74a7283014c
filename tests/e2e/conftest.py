"""Stacks of real processes, shared by the tests of a module where a test does not change flags."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from support.clients import tls_on
from support.clients.stack import CPU, ORACLE, Process, Stack, running_executor, running_stack


@pytest.fixture(scope="module")
def oracle_stack() -> Iterator[Stack]:
    """Manager and oracle executor with room for everything; the demo model's vocabulary and tokenizer, no torch."""
    with running_stack([*ORACLE, "--kv-memory", "64MiB"], ["--num-device-blocks", "4096"]) as stack:
        yield stack


@pytest.fixture(scope="module")
def cpu_stack() -> Iterator[Stack]:
    """Manager and torch executor with the demo model."""
    with running_stack(CPU) as stack:
        yield stack


@pytest.fixture(scope="module")
def executor() -> Iterator[Process]:
    """An oracle executor with a gate before its steps, which serves one manager after the other and ends when told."""
    with running_executor(ORACLE, gated=True) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture(scope="session", autouse=tls_on.ASKED_FOR)
def secured_channels() -> Iterator[None]:
    """Channels to stacks have credentials, whoever opens them in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc, "insecure_channel", tls_on.secured(grpc.insecure_channel, grpc.secure_channel))
        patch.setattr(grpc.aio, "insecure_channel", tls_on.secured(grpc.aio.insecure_channel, grpc.aio.secure_channel))
        yield
