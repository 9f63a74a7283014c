"""A quiet tenant beside busy ones: the division of a trace, and what the quiet one gets in each case."""

from __future__ import annotations

from functools import cache

import pytest
from support.engine.replays import SMALL, ignore

from pagekv.kvmanager.replay.tenants_replay import (
    CASES,
    TenantRow,
    conversations,
    owners,
    replay_tenants,
    tenants_as_json,
    tenants_as_table,
)
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceError, TraceRecord

SYSTEM = 0


def flooded(turns: int = 12) -> list[TraceRecord]:
    """Eight conversations with a system prompt in common. The first comes back for a longer turn every 0.2 s, and each
    of the other seven sends four prompts of its own at once in the meantime, more than the steps can take.
    """
    records, fresh = [], 1000
    for turn in range(turns):
        for conversation in range(8):
            base = 10 + 100 * conversation
            for _ in range(4 if conversation else 1):
                ids = [SYSTEM, *range(base, base + (1 if conversation else 2 + turn))]
                # Nothing of a flooder's prompt but its head comes again.
                ids += range(fresh, fresh + (9 if conversation else 0))
                fresh += 9
                records.append(
                    TraceRecord(0.2 * turn + 0.001 * (conversation == 0 < turn), 4 * len(ids), 4, tuple(ids))
                )
    return records


FLOODED = flooded()


def cases(records: list[TraceRecord], blocks: int | None, tenants: int = 2) -> dict[str, TenantRow]:
    rows = replay_tenants(records, SMALL, "lru", blocks, tenants, ignore)
    return {row.case: row for row in rows}


@cache
def flooded_cases() -> dict[str, TenantRow]:
    """With the pool that most tests take; made once for all of them."""
    return cases(FLOODED, 64)


def waits(row: TenantRow) -> tuple[float, float]:
    p50, p95 = row.quiet.ttft_p50_s, row.quiet.ttft_p95_s
    assert p50 is not None
    assert p95 is not None
    return p50, p95


def test_a_conversation_is_what_follows_the_system_prompt() -> None:
    ids = [(0, 1), (0, 2), (0, 1, 3), (0,), (), (0, 2, 4), (0,), ()]
    records = [TraceRecord(0.0, 4 * len(each) or 4, 1, each) for each in ids]
    assert conversations(records) == [0, 1, 0, 2, 3, 1, 4, 5]


def test_the_first_tenant_has_one_conversation_of_four_times_as_many_as_there_are_tenants() -> None:
    records = [TraceRecord(float(at), 4, 1, (at,)) for at in range(24)]
    assert owners(records, 3) == [1, *[2, 3] * 5, 2] * 2
    # Every turn of a conversation is one tenant's.
    found = owners(FLOODED, 2)
    assert [owner for owner, record in zip(found, FLOODED, strict=True) if 10 in record.hash_ids] == [1] * 12
    assert found.count(1) == 12
    with pytest.raises(TraceError, match="--tenants 30: the trace has too few conversations"):
        owners(records, 30)


def test_a_quiet_tenant_is_served_almost_as_if_alone_and_not_first_come_first_served() -> None:
    found = flooded_cases()
    assert [*found] == [*CASES]
    alone, one, fair, floor = (waits(found[case]) for case in CASES)
    for which in (0, 1):
        assert alone[which] < fair[which] < one[which]
        # All slots are taken: until the first of the sequences that run has its four tokens.
        assert max(fair[which], floor[which]) < 5 * alone[which]
        assert one[which] > 100 * alone[which]


def test_a_floor_keeps_hits_that_fair_shares_lose() -> None:
    found = cases(FLOODED, 48)
    alone, one, fair, floor = (found[case].quiet.hit_tokens for case in CASES)
    assert one < fair < floor == alone
    assert (found["floor"].floor, found["fair"].floor) == (24, 0)


def test_the_same_requests_are_in_every_case() -> None:
    found = cases([*FLOODED, TraceRecord(0.5, 4 * 40, 1, tuple(range(5000, 5040)))], 64)
    assert {row.refused for row in found.values()} == {1}
    assert {(row.quiet.requests, row.quiet.prompt_tokens) for row in found.values()} == {(12, 4 * sum(range(3, 15)))}
    assert [row.others.requests for row in found.values()] == [0, *[12 * 28] * 3]
    assert found["alone"].others.ttft_p50_s is None


def test_one_tenant_is_the_plain_replay() -> None:
    row, plain = flooded_cases()["one"], replay_timed(FLOODED, SMALL, "lru", 64, ignore)
    assert plain.timing is not None
    assert row.decisions == plain.timing.decisions
    assert row.quiet.hit_tokens + row.others.hit_tokens == plain.hit_tokens


def test_an_unbounded_pool_needs_no_floor() -> None:
    found = cases(FLOODED, None)
    assert [*found] == ["alone", "one", "fair"]
    assert found["fair"].quiet.hit_tokens == found["alone"].quiet.hit_tokens
    assert {row.preemptions for row in found.values()} == {0}


def test_no_request_of_the_quiet_tenant_fits() -> None:
    with pytest.raises(TraceError, match="--blocks 4: no request of the quiet tenant fits beside the floor"):
        cases(FLOODED, 4)


def test_the_table_and_the_json_say_which_requests_are_the_quiet_tenants() -> None:
    rows = [*flooded_cases().values()]
    head, empty, _, *table = tenants_as_table(2, rows).splitlines()
    assert head == (
        "2 tenants: the first has one conversation of each 8 and is quiet, the others have the rest in turns "
        "(12 requests and 336)"
    )
    assert empty == ""
    assert "and a floor of 32" in table[-1]
    assert [line.split()[0] for line in table] == ["lru"] * 4
    value = tenants_as_json("t.jsonl", SMALL, 2, rows)
    assert (value["tenants"], value["quiet_has_one_conversation_of"]) == (2, 8)
    assert [row["case"] for row in value["rows"]] == [*CASES]
    assert value["rows"][0]["quiet"]["hit_rate"] == rows[0].quiet.hit_rate > 0
