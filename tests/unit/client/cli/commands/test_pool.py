"""Lists of blocks and requests of any length, and requests that are ended."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client.cli.commands.pool import _pages
from pagekv.client.cli.main import main
from pagekv.client.types import BlockList
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_abort_of_nothing_is_no_failure(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Abort", pb.AbortResponse())
    assert main(["abort", "gone"]) == 0


def test_a_namespace_of_another_caller_neither_controls_the_terminal_nor_begins_a_line(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = "\x1b[2J\x1b[H\nr-2  running"
    found = operator_pb.RequestInfo(request_id="r-1", namespace=namespace)
    server.expect("ListRequests", operator_pb.ListRequestsResponse(requests=[found], total=1))
    server.expect("ListPins", cache_pb.ListPinsResponse(pins=[cache_pb.PinInfo(pin_id="p-1", namespace=namespace)]))
    for command in ("requests", "pins"):
        assert main([command]) == 0
        _, row = capsys.readouterr().out.splitlines()
        assert r"\x1b[2J\x1b[H\nr-2  running" in row


class _Entries(tuple[Any, ...]):
    """Counts the entries that are copied."""

    copied = 0

    def __iter__(self) -> Any:
        _Entries.copied += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        _Entries.copied += len(self) + len(other)
        return _Entries([*tuple.__iter__(self), *other])


@pytest.mark.parametrize("num_pages", [10, 40])
def test_entries_of_many_pages_are_copied_a_few_times(num_pages: int) -> None:
    """Not once for each page that follows."""
    pages = iter(range(1, num_pages + 1))

    def ask(size: int, token: str) -> BlockList:
        number = next(pages)
        return BlockList(blocks=_Entries([number] * 5), next_page_token="" if number == num_pages else str(number))

    _Entries.copied = 0
    found: Any = _pages(10**6, "blocks", ask).blocks
    assert found == tuple(number for number in range(1, num_pages + 1) for _ in range(5))
    assert _Entries.copied <= 2 * len(found)
