"""Accounts of what tenants' requests took, limits that the engine keeps, and what one may see of another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, described, expect, read, until
from support.event_loop import run_by

from pagekv.common.errors import AlreadyExists, LimitExceeded, Overloaded
from pagekv.kvmanager.access.toml_file import TomlFileError
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.scheduling import prepared_prompt
from pagekv.kvmanager.tenants.accounts import Accounts


def accounts_of(folder: Path, text: str) -> Accounts:
    (folder / "tenants.toml").write_text(text)
    return Accounts(folder / "tenants.toml")


def of(
    accounts: Accounts, tenant: str, name: str, prompt: list[int], max_tokens: int = 6, n: int = 1
) -> GenerateCommand:
    return replace(command(name, prompt, max_tokens, n), tenant=accounts.tenant(tenant))


def test_tokens_and_requests_are_booked() -> None:
    accounts = Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for name in ("a", "b"):
            stream = engine.submit(of(accounts, "alice", name, [1, 2, 3, 4, 5], n=2))
            assert accounts.of("alice").live == 1
            assert await read(stream) == expect([1, 2, 3, 4, 5])
            engine.release(stream)
        stream = engine.submit(of(accounts, "bob", "a", [9]))
        await read(stream)
        engine.release(stream)
        alice, bob = (accounts.of(name).usage for name in ("alice", "bob"))
        assert (alice.requests, bob.requests, accounts.of("alice").live) == (2, 1, 0)
        assert (alice.output_tokens, bob.output_tokens) == (24, 6)
        assert alice.prompt_tokens >= 10
        assert 0 < alice.cached_tokens < alice.prompt_tokens
        assert bob.cached_tokens == 0

    engine_harness.run(body, accounts=accounts)


@run_by(engine_harness.run)
async def test_where_nobody_is_asked_nothing_is_booked(engine: EngineLoop) -> None:
    stream = engine.submit(command("a", [1]))
    await read(stream)
    assert engine.accounts.all() == []
    assert not engine._state.serving().waiting.served.several


def test_an_id_is_taken_within_a_tenant_alone() -> None:
    accounts = Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.005
        streams = [engine.submit(of(accounts, name, "same", [1], 60)) for name in ("alice", "bob")]
        with pytest.raises(AlreadyExists):
            engine.submit(of(accounts, "alice", "same", [1]))
        assert not engine.abort("same", "carol")
        assert engine.abort("same", "bob")
        assert len((await read(streams[0]))[0]) == 60
        engine.release(streams[1])
        both = [engine.submit(of(accounts, name, "same", [1], 60)) for name in ("alice", "bob")]
        # An operator names no tenant.
        assert engine.abort("same")
        assert engine.statistics.stats().running_sequences + engine.statistics.stats().waiting_sequences == 0
        for stream in both:
            engine.release(stream)

    engine_harness.run(body, accounts=accounts)


def test_a_full_queue_has_room_for_a_tenant_below_its_share() -> None:
    accounts = Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(of(accounts, "flood", str(at), [1])) for at in range(6)]
        with pytest.raises(Overloaded, match=r"the queue is full$"):
            engine.submit(of(accounts, "flood", "more", [1]))
        streams += [engine.submit(of(accounts, "quiet", str(at), [2])) for at in range(3)]
        with pytest.raises(Overloaded, match=r"the queue is full$"):
            engine.submit(of(accounts, "quiet", "more", [2]))
        # Of whom it was refused, as with a limit of its own.
        assert [accounts.of(name).usage.refusals for name in ("flood", "quiet")] == [{"max_queue": 1}] * 2
        for stream in streams:
            await read(stream)

    engine_harness.run(body, accounts=accounts, max_queue=6)


def test_answers_that_one_tenant_does_not_read_refuse_no_other() -> None:
    accounts = Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        unread = [engine.submit(of(accounts, "flood", str(at), [1])) for at in range(4)]
        await until(lambda: engine.statistics.stats().unread_sequences == 4)
        with pytest.raises(Overloaded, match="too many sequences have ended"):
            engine.submit(of(accounts, "flood", "more", [1]))
        assert accounts.of("flood").usage.refusals == {"max_unread": 1}
        quiet = engine.submit(of(accounts, "quiet", "a", [2]))
        await read(quiet)
        for stream in (*unread, quiet):
            engine.release(stream)

    engine_harness.run(body, accounts=accounts, max_unread=4)


def test_tenants_that_do_not_read_share_what_may_be_unread() -> None:
    """Also those whose requests have all ended."""
    accounts = Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for name, share in (("a", 6), ("b", 3), ("c", 2), ("d", 1)):
            for at in range(share):
                engine.submit(of(accounts, name, str(at), [1]))
            await engine._live.idle.wait()
            with pytest.raises(Overloaded, match="too many sequences have ended"):
                engine.submit(of(accounts, name, "more", [1]))

    engine_harness.run(body, accounts=accounts, max_unread=6)


def test_limits_of_a_tenant(tmp_path: Path) -> None:
    text = "[tenants.few]\nmax_waiting = 2\n[tenants.slow]\ntokens_per_minute = 12\n[tenants.small]\nmax_blocks = 3\n"
    accounts = accounts_of(tmp_path, text)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(of(accounts, "few", str(at), [1])) for at in range(2)]
        with pytest.raises(
            Overloaded, match="max_waiting: your tenant has 2 of at most 2, and asked for 1 more"
        ) as full:
            engine.submit(of(accounts, "few", "more", [1]))
        assert (full.value.retry_delay_s, full.value.limit) == (1, 2)
        slow = engine.submit(of(accounts, "slow", "a", [1] * 10, 6))
        await read(slow)
        with pytest.raises(Overloaded, match="tokens_per_minute: your tenant may use 12") as caught:
            engine.submit(of(accounts, "slow", "b", [1]))
        # Four tokens too many at one in five seconds.
        assert 15 < caught.value.retry_delay_s <= 20.1
        size = engine._state.serving().pool.block_size
        with pytest.raises(LimitExceeded, match="max_blocks: your tenant has 0 of at most 3, and asked for 4 more"):
            engine.submit(of(accounts, "small", "a", [1] * size * 3, 2))
        small = engine.submit(of(accounts, "small", "b", [1] * size, 2))
        for stream in (*streams, small):
            await read(stream)
        refusals = {name: dict(accounts.of(name).usage.refusals) for name in ("few", "slow", "small")}
        assert refusals == {"few": {"max_waiting": 1}, "slow": {"tokens_per_minute": 1}, "small": {"max_blocks": 1}}

    engine_harness.run(body, accounts=accounts)


def test_long_prompts_on_their_way_into_the_engine_wait_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)
    accounts, long = accounts_of(tmp_path, "[tenants.few]\nmax_waiting = 2\n[tenants.others]\n"), [*range(1, 42)]

    async def body(engine: EngineLoop, bench: Bench) -> None:
        calls = [asyncio.create_task(engine.queue(of(accounts, "few", str(at), long, n=2))) for at in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="max_waiting: your tenant has 2 of at most 2, and asked for 1 more"):
            await engine.queue(of(accounts, "few", "more", [1]))
        other = await engine.queue(of(accounts, "others", "a", [1]))
        for stream in (*[await call for call in calls], other):
            await read(stream)
            engine.release(stream)
        engine.release(await engine.queue(of(accounts, "few", "later", [1])))

    engine_harness.run(body, accounts=accounts)


def test_floors_that_do_not_go_into_the_pool(tmp_path: Path) -> None:
    accounts = accounts_of(tmp_path, "[tenants.a]\nfloor_blocks = 2\n")

    async def body(engine: EngineLoop, bench: Bench) -> None:
        tenants = engine._state.serving().pool.tenants
        assert tenants is not None
        assert tenants.floors_beside(0) == 2
        (tmp_path / "tenants.toml").write_text("[tenants.a]\nfloor_blocks = 999\n")
        apply = accounts._reload()
        with pytest.raises(TomlFileError, match=r"tenants.a.floor_blocks: the floors are 999 blocks together"):
            apply()
        assert tenants.floors_beside(0) == 2
        (tmp_path / "tenants.toml").write_text("[tenants.a]\nfloor_blocks = 3\n")
        accounts._reload()()
        assert tenants.floors_beside(0) == 3

    engine_harness.run(body, accounts=accounts)


def test_floors_of_a_larger_pool_stay_through_reloads(tmp_path: Path) -> None:
    floors = "[tenants.a]\nfloor_blocks = 6\n[tenants.b]\nfloor_blocks = 2\n"
    accounts = accounts_of(tmp_path, floors)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.description = described(device_kv_bytes=4)
        assert bench.link is not None
        bench.link.lose()
        await until(lambda: engine._state.serving().pool.num_blocks == 4)
        (tmp_path / "tenants.toml").write_text(floors + "max_waiting = 1\n[tenants.c]\n")
        accounts._reload()()
        assert accounts.of("b").limits.max_waiting == 1
        tenants = engine._state.serving().pool.tenants
        assert tenants is not None
        assert tenants.floors_beside(0) == 3 + 1
        (tmp_path / "tenants.toml").write_text("[tenants.a]\nfloor_blocks = 5\n")
        with pytest.raises(TomlFileError, match=r"tenants.a.floor_blocks: the floors are 5 blocks together"):
            accounts._reload()()
        assert tenants.floors_beside(0) == 3 + 1
        (tmp_path / "tenants.toml").write_text("[tenants.a]\nfloor_blocks = 2\n")
        accounts._reload()()
        assert tenants.floors_beside(0) == 2

    engine_harness.run(body, accounts=accounts)


def test_blocks_are_booked_for_the_time_that_they_were_there() -> None:
    """An idle hour costs what was cached in it, and whoever comes next nothing."""
    accounts, now = Accounts(), [0.0]

    async def body(engine: EngineLoop, bench: Bench) -> None:
        engine._tenants._clock = lambda: now[0]
        engine._tenants._looked_at = 0.0
        pool = engine._state.serving().pool
        for at, tenant in enumerate(("alice", "bob", "bob")):
            now[0] += 1.0
            if at == 2:
                now[0] += 3600.0
            stream = engine.submit(of(accounts, tenant, str(at), [at] * (pool.block_size * 3 + 1), 2))
            await read(stream)
            engine.release(stream)
        cached = {name: accounts.of(name).usage.block_seconds for name in ("alice", "bob")}
        # Three blocks each from then on. Bob's of the last request are not there yet at the look that ends the hour.
        assert 3 * 3600 <= cached["alice"] <= 4 * 3605
        assert cached["bob"] <= 4 * 3605

    engine_harness.run(body, accounts=accounts)


def test_requests_of_an_id_are_found_without_a_look_at_all_others() -> None:
    accounts = Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        streams = [engine.submit(of(accounts, name, "same", [1])) for name in ("bob", "alice")]
        live = engine._state.live
        assert [request.command.tenant.name for request in live.named("same")] == ["bob", "alice"]
        assert live.named("other") == []
        assert live.get("same", "carol") is None
        for stream in streams:
            await read(stream)
        assert (live.named("same"), len(live)) == ([], 0)

    engine_harness.run(body, accounts=accounts)
