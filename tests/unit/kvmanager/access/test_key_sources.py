"""Sources of key sets: when they are read again, and what stays when that fails."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from support.access.issuer import ec_key, jwk, jwks, rsa_key
from support.access.key_server import key_server
from support.clock import Clock
from support.event_loop import in_event_loop

from pagekv.kvmanager.access import key_sources
from pagekv.kvmanager.access.key_sources import REFRESH_S, RETRY_S, KeySetFile, KeySetUrl

ONE, TWO = jwks(jwk(ec_key(), kid="a")), jwks(jwk(ec_key(), kid="a"), jwk(rsa_key(), kid="b"))


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(ONE)
    source = KeySetFile(path)
    first = source.current()
    assert first is not None
    assert source.current() is first
    path.write_bytes(TWO)
    second = asyncio.run(source.newer())
    assert second is not None
    assert sorted(second.by_id) == ["a", "b"]
    # The same text written again leaves what was verified as it was.
    os.utime(path, (1, 1))
    assert source.current() is second
    assert source.refresh_failures == 0
    assert caplog.text == ""


def test_a_file_that_cannot_be_read_leaves_the_last_good_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(ONE)
    source = KeySetFile(path)
    good = source.current()
    path.write_text("no JSON at all")
    assert source.current() is good
    assert source.current() is good
    path.unlink()
    assert source.current() is good
    assert source.current() is good
    # Once for each state, however many tokens come.
    assert source.refresh_failures == 2
    assert len(caplog.records) == 2
    assert "jwks.json: a key set must be JSON" in caplog.text
    path.write_bytes(TWO)
    assert source.current() is not good


@pytest.mark.timeout(20)
def test_a_file_that_was_never_good_has_no_set(tmp_path: Path) -> None:
    source = KeySetFile(tmp_path / "none")
    assert source.current() is None
    assert source.refresh_failures == 1
    assert KeySetFile(tmp_path).current() is None
    os.mkfifo(tmp_path / "pipe")
    assert KeySetFile(tmp_path / "pipe").current() is None


@in_event_loop
async def test_a_url_is_read_when_the_first_token_comes_and_then_every_five_minutes() -> None:
    clock = Clock()
    with key_server(ONE) as server:
        source = KeySetUrl(server.url, clock)
        assert source.current() is None
        assert server.asked == []
        first = await source.newer()
        assert first is not None
        clock.now += REFRESH_S - 1
        assert source.current() is first
        assert len(server.asked) == 1
        server.body = TWO
        clock.now += 1
        # Nobody waits for it.
        assert source.current() is first
        second = await source.newer()
        assert second is not None
        assert sorted(second.by_id) == ["a", "b"]
        assert len(server.asked) == 2
        clock.now += REFRESH_S
        source.current()
        # The same text: the same set.
        assert await source.newer() is second
        assert len(server.asked) == 3


@in_event_loop
async def test_unknown_keys_cause_one_request_in_30_seconds() -> None:
    clock = Clock()
    with key_server(ONE) as server:
        source = KeySetUrl(server.url, clock)
        # At once: all wait for the same answer.
        found = await asyncio.gather(*(source.newer() for _ in range(50)))
        assert all(keys is not None for keys in found)
        for _ in range(50):
            await source.newer()
        assert len(server.asked) == 1
        clock.now += RETRY_S
        for _ in range(50):
            await source.newer()
        assert len(server.asked) == 2


@in_event_loop
async def test_an_issuer_that_fails_leaves_the_last_good_set(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with key_server(ONE) as server:
        source = KeySetUrl(server.url, clock)
        good = await source.newer()
        for server.status, server.body in ((500, ONE), (200, b"<html>"), (200, jwks())):
            clock.now += REFRESH_S
            assert source.current() is good
            assert await source.newer() is good
            assert source.current() is good
        assert source.refresh_failures == 3
        assert len(caplog.records) == 3
        assert "answered with status 500" in caplog.text
        server.body = TWO
        clock.now += RETRY_S
        assert source.current() is good
        assert await source.newer() is not good


@in_event_loop
async def test_a_slow_issuer_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "LIMIT_S", 0.2)
    with key_server(ONE) as server:
        server.pause_s = 0.05
        source = KeySetUrl(server.url)
        begun = time.monotonic()
        assert await source.newer() is None
        # The whole answer would take many times as long.
        assert 0.15 < time.monotonic() - begun < server.pause_s * len(ONE) / 2
        # The attempt goes on, and no second one begins.
        assert await source.newer() is None
        assert len(server.asked) == 1
        server.pause_s = 0.0001


@in_event_loop
async def test_a_caller_that_leaves_takes_nothing_from_the_others() -> None:
    with key_server(ONE) as server:
        server.pause_s = 0.001
        source = KeySetUrl(server.url)
        leaves, stays = (asyncio.create_task(source.newer()) for _ in range(2))
        await asyncio.sleep(0.02)
        leaves.cancel()
        assert await stays is not None


def test_a_source_goes_on_in_another_loop() -> None:
    clock = Clock()
    with key_server(ONE) as server:
        source = KeySetUrl(server.url, clock)
        assert asyncio.run(source.newer()) is not None
        clock.now += RETRY_S
        assert asyncio.run(source.newer()) is not None
