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


def test_lists_end_at_the_limit_and_say_that_there_are_more(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, str]] = []

    def check(request: operator_pb.ListRequestsRequest) -> None:
        asked.append((request.page_size, request.page_token))

    def expect_requests(*names: str, **more: str) -> None:
        found = [operator_pb.RequestInfo(request_id=name) for name in names]
        server.expect("ListRequests", operator_pb.ListRequestsResponse(requests=found, total=9, **more), check=check)

    expect_requests("r-1", "r-2", next_page_token="t")
    expect_requests("r-3", next_page_token="u")
    assert main(["requests", "--limit", "3"]) == 0
    assert asked == [(3, ""), (1, "t")]
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["request", "r-1", "r-2", "r-3"]
    assert err == "9 in all: raise --limit\n"
    expect_requests("r-1")
    assert main(["requests"]) == 0
    assert capsys.readouterr().err == ""
    blocks = [operator_pb.BlockInfo(block_id=3)]
    for token, note in (("t", "there are more: raise --limit\n"), ("", "")):
        server.expect("ListBlocks", operator_pb.ListBlocksResponse(blocks=blocks, next_page_token=token))
        assert main(["blocks", "--limit", "1"]) == 0
        assert capsys.readouterr().err == note


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
