"""Accounts of tenants: their limits, when the file changes, and where there are many."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.event_loop import in_event_loop

from pagekv.common.errors import LimitExceeded, Overloaded, PermissionDenied
from pagekv.kvmanager.access.toml_file import TomlFileError
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant
from pagekv.kvmanager.tenants import accounts as module
from pagekv.kvmanager.tenants.accounts import OTHERS, Account, Accounts
from pagekv.kvmanager.tenants.limits import SharedNamespace, TenantLimits
from pagekv.kvmanager.tenants.tenants_file import MAX_TENANTS, TenantsFile, read_tenants

NAMED = "[tenants.a]\nmax_running = 2\n[tenants.b]\nweight = 3\nfloor_blocks = 10\n"


def opened(folder: Path, text: str) -> Accounts:
    path = folder / "tenants.toml"
    path.write_text(text)
    return Accounts(path)


def reload(accounts: Accounts, text: str) -> None:
    """The file has another text; what a watch would do then."""
    assert accounts._path is not None
    accounts._path.write_text(text)
    accounts._reload()()


def test_nobody_but_no_tenant_where_there_is_no_file() -> None:
    accounts = Accounts()
    assert accounts.all() == []
    assert accounts.files is None
    nobody = accounts.of("")
    assert (nobody.tenant, accounts.tenant("")) == (NO_TENANT, NO_TENANT)
    nobody.usage.requests += 1
    assert accounts.of("").usage.requests == 1
    # Not among the tenants, for it is none.
    assert accounts.all() == []


def test_whoever_comes_has_an_account_where_there_is_no_file() -> None:
    accounts, told = Accounts(), list[int]()
    accounts.on_change = lambda: told.append(len(accounts.all()))
    assert accounts.tenant("x") == Tenant("x", 1)
    assert accounts.tenant("y") == Tenant("y", 2)
    assert accounts.of("x") is accounts.all()[0]
    assert accounts.of("x").limits == TenantLimits()
    assert told == [1, 2]


def test_named_tenants_have_accounts_from_the_start(tmp_path: Path) -> None:
    accounts = opened(tmp_path, NAMED)
    assert [(account.tenant, account.limits.weight) for account in accounts.all()] == [
        (Tenant("a", 1), 1.0),
        (Tenant("b", 2), 3.0),
    ]
    assert accounts.file.num_floor_blocks == 10


def test_an_unknown_tenant_is_refused_without_a_default(tmp_path: Path) -> None:
    accounts = opened(tmp_path, NAMED)
    for ask in (accounts.of, accounts.tenant):
        with pytest.raises(PermissionDenied, match=r"^the tenant c is not known$"):
            ask("c")
    assert len(accounts.all()) == 2


def test_an_unknown_tenant_has_the_default(tmp_path: Path) -> None:
    accounts = opened(tmp_path, f"{NAMED}[default]\nmax_running = 7\n")
    assert (accounts.of("c").limits.max_running, accounts.of("a").limits.max_running) == (7, 2)


def test_tenants_beyond_the_bound_share_one_account(tmp_path: Path) -> None:
    accounts = opened(tmp_path, f"{NAMED}[default]\nmax_running = 7\nweight = 2\n")
    for number in range(MAX_TENANTS - 2):
        accounts.of(f"t{number}")
    told = list[None]()
    accounts.on_change = lambda: told.append(None)
    first, second = accounts.of("late"), accounts.of("later")
    assert first is second
    assert first.tenant == Tenant(OTHERS, MAX_TENANTS + 1)
    assert first.limits == TenantLimits(max_running=7, weight=2.0)
    # Names are kept, for blocks are found by them.
    assert accounts.tenant("late") == Tenant("late", MAX_TENANTS + 1)
    assert accounts.tenant("t0").number == 3
    assert len(accounts.all()) == MAX_TENANTS + 1
    # Once: the pool has to know of its weight.
    assert told == [None]


def test_the_shared_account_follows_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 2)
    accounts = opened(tmp_path, f"{NAMED}[default]\nmax_running = 7\n")
    others = accounts.of("late")
    reload(accounts, f"{NAMED}[default]\nmax_running = 8\n")
    assert others.limits.max_running == 8
    reload(accounts, NAMED)
    # For the requests that it has: nobody new comes in.
    assert others.limits.max_running == 8
    with pytest.raises(PermissionDenied):
        accounts.of("late")


def test_no_new_name_where_there_is_no_account_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 3)
    accounts = opened(tmp_path, f"{NAMED}[default]\n")
    accounts.of("c")
    with pytest.raises(TomlFileError) as caught:
        reload(accounts, f"{NAMED}[tenants.d]\n[default]\n")
    assert str(caught.value) == (
        f"{tmp_path / 'tenants.toml'}: tenants: 1 are new and 3 have accounts until the manager ends; "
        "there may be 3 at most: restart the manager"
    )
    assert "d" not in accounts.file.tenants
    reload(accounts, f"{NAMED}[tenants.c]\nweight = 9\n[default]\n")
    assert accounts.of("c").limits.weight == 9


def test_accounts_and_debts_outlive_another_file(tmp_path: Path) -> None:
    accounts = opened(tmp_path, "[tenants.a]\ntokens_per_minute = 60\n")
    account = accounts.of("a")
    account.usage.prompt_tokens, account.live = 5, 1
    account.tokens.take(1000)
    told = list[float]()
    accounts.on_change = lambda: told.append(accounts.of("b").limits.weight)
    reload(accounts, f"[tenants.a]\ntokens_per_minute = 120\n{NAMED.split('2', 1)[1]}")
    assert accounts.of("a") is account
    assert (account.usage.prompt_tokens, account.live, account.limits.tokens_per_minute) == (5, 1, 120)
    # Below zero by 940 tokens, which come at two a second.
    assert account.tokens.wait_s() == pytest.approx(470, abs=5)
    assert accounts.of("b").tenant == Tenant("b", 2)
    # Once, when all is in place.
    assert told == [3.0]


def test_a_tenant_that_is_taken_out(tmp_path: Path) -> None:
    accounts = opened(tmp_path, NAMED)
    account = accounts.of("b")
    reload(accounts, "[tenants.a]\n")
    with pytest.raises(PermissionDenied):
        accounts.of("b")
    # For requests that it has: its weight, but none of the blocks that the file gives away.
    assert account.limits == TenantLimits(weight=3.0)
    assert account in accounts.all()
    reload(accounts, NAMED)
    assert accounts.of("b") is account
    assert account.limits == TenantLimits(weight=3.0, floor_blocks=10)
    reload(accounts, "[default]\nweight = 2\n")
    assert accounts.of("b").limits == TenantLimits(weight=2.0)


def test_floors_never_exceed_the_files_while_it_is_replaced(tmp_path: Path) -> None:
    accounts = opened(tmp_path, "[tenants.a]\nfloor_blocks = 10\n")
    told = list[int]()
    accounts.on_change = lambda: told.append(sum(account.limits.floor_blocks for account in accounts.all()))
    reload(accounts, "[tenants.b]\nfloor_blocks = 10\n[tenants.c]\nfloor_blocks = 0\n")
    assert told == [10]


@pytest.mark.parametrize("text", ["[tenants.a]\nmax_runing = 2", "[tenants.a", "[tenants.a]\nweight = 0"])
def test_the_old_file_stays_after_an_error(tmp_path: Path, text: str) -> None:
    accounts = opened(tmp_path, NAMED)
    before = accounts.file
    accounts.on_change = lambda: pytest.fail("nothing has changed")
    with pytest.raises(TomlFileError, match=r"tenants\.toml: "):
        reload(accounts, text)
    assert accounts.file is before
    assert accounts.of("a").limits.max_running == 2


def test_the_old_file_stays_where_the_new_one_does_not_go_with_the_pool(tmp_path: Path) -> None:
    accounts = opened(tmp_path, NAMED)

    def check(file: TenantsFile) -> None:
        if file.num_floor_blocks > 50:
            raise ValueError("too many")

    accounts.check, before = check, accounts.file
    accounts.on_change = lambda: pytest.fail("nothing has changed")
    with pytest.raises(ValueError, match="too many"):
        reload(accounts, "[tenants.c]\nfloor_blocks = 51\n")
    assert accounts.file is before
    assert [account.tenant.name for account in accounts.all()] == ["a", "b"]


def test_a_file_that_cannot_be_used_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TomlFileError, match="cannot be read"):
        Accounts(tmp_path / "none.toml")


@in_event_loop
async def test_the_file_is_watched(tmp_path: Path) -> None:
    accounts = opened(tmp_path, NAMED)
    assert accounts.files is not None
    assert accounts.files.what == "tenants"
    changed = asyncio.Event()
    accounts.on_change = changed.set
    watch = asyncio.create_task(accounts.files.watch(0.01))
    (tmp_path / "tenants.toml").write_text("[tenants.a]\nmax_running = 1234\n")
    async with asyncio.timeout(120):
        await changed.wait()
    assert accounts.of("a").limits.max_running == 1234
    watch.cancel()


def test_a_change_while_the_file_is_read_for_the_first_time_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_change(path: Path) -> TenantsFile:
        found = read_tenants(path)
        path.write_text("[tenants.changed-meanwhile]\n")
        return found

    monkeypatch.setattr(module, "read_tenants", read_and_change)
    accounts = opened(tmp_path, NAMED)
    assert accounts.files is not None
    assert accounts.files._state() != accounts.files._read


def test_a_namespace_of_the_file_is_shared_and_no_other(tmp_path: Path) -> None:
    accounts = opened(tmp_path, f'{NAMED}[namespaces.handbook]\nread = ["a"]\n')
    assert accounts.file.namespaces.get("handbook") == SharedNamespace(frozenset("a"), frozenset())
    assert accounts.file.namespaces.get("mine") is None


def test_counts_are_refused_above_their_limit() -> None:
    account = Account(Tenant("a", 1))
    account.check_count("max_running", 10**9)
    account.set_limits(TenantLimits(max_running=3, max_waiting=0))
    account.check_count("max_running", 2)
    with pytest.raises(LimitExceeded) as caught:
        account.check_count("max_running", 3)
    assert str(caught.value) == "max_running: your tenant has 3 of at most 3, and asked for 1 more"
    assert caught.value.limit == 3
    with pytest.raises(LimitExceeded, match="has 1 of at most 3, and asked for 5 more"):
        account.check_count("max_running", 1, 5)
    assert account.usage.refusals == {"max_running": 2}


def test_a_tenant_whose_queue_is_full_is_told_when_to_come_back() -> None:
    account = Account(Tenant("a", 1))
    account.check_count("max_waiting", 10**9, retry_delay_s=1.0)
    account.set_limits(TenantLimits(max_waiting=2))
    account.check_count("max_waiting", 1, retry_delay_s=1.0)
    with pytest.raises(Overloaded, match="max_waiting: your tenant has 2 of at most 2, and asked for 1 more") as full:
        account.check_count("max_waiting", 2, retry_delay_s=1.5)
    assert (full.value.retry_delay_s, full.value.limit) == (1.5, 2)
    assert account.usage.refusals == {"max_waiting": 1}


def test_rates_are_refused_while_too_much_was_taken() -> None:
    account = Account(Tenant("a", 1))
    account.tokens.take(1e9)
    account.check_tokens()
    account.check_text()
    account.set_limits(TenantLimits(tokens_per_minute=600, tokenized_bytes_per_second=1000))
    # A minute's tokens, and two seconds' text.
    account.tokens.take(599)
    account.text.take(1990)
    account.check_tokens()
    account.check_text()
    account.tokens.take(1000)
    account.text.take(4000)
    with pytest.raises(Overloaded) as caught:
        account.check_tokens()
    assert str(caught.value) == "tokens_per_minute: your tenant may use 600, and has used more"
    assert caught.value.limit == 600
    assert caught.value.retry_delay_s == pytest.approx(100, abs=2)
    with pytest.raises(Overloaded, match=r"^tokenized_bytes_per_second: your tenant may use 1000") as caught:
        account.check_text()
    assert caught.value.retry_delay_s == pytest.approx(4, abs=1)
    assert account.usage.refusals == {"tokens_per_minute": 1, "tokenized_bytes_per_second": 1}
    account.set_limits(TenantLimits())
    account.check_tokens()
