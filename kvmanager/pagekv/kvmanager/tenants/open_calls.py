"""Counts and bounds the gRPC calls that a tenant has open at once, over all of its connections."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pagekv.common.server import Admit
from pagekv.kvmanager.access.caller import tenant_of_call
from pagekv.kvmanager.tenants.accounts import Account, Accounts

RETRY_DELAY_S = 1.0


def count_open_calls(accounts: Accounts, admit: Admit) -> Callable[[str, Any], Coroutine[Any, Any, None]]:
    """An `admit` that also counts a call in its tenant's account until it ends, if the account has a bound. It raises
    as `admit` does, and Overloaded while the tenant has as many open calls as it may.
    """

    async def admit_and_count(method: str, context: Any) -> None:
        await admit(method, context)
        account = accounts.with_bounded_calls(tenant_of_call())
        if account is not None:
            # With a delay, because a call that resumes a stream may arrive before the broken stream is noticed.
            account.check_count("max_calls", account.calls, retry_delay_s=RETRY_DELAY_S)
            account.calls += 1
            context.add_done_callback(partial(_leave, account))

    return admit_and_count


def _leave(account: Account, _: object) -> None:
    account.calls -= 1
