"""Calls of gRPC that a tenant has open at once, over all of its connections, and the bound on them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pagekv.common.server import Admit
from pagekv.kvmanager.access.caller import tenant_of_call
from pagekv.kvmanager.tenants.accounts import Account, Accounts

RETRY_DELAY_S = 1.0


def count_open_calls(accounts: Accounts, admit: Admit) -> Callable[[str, Any], Coroutine[Any, Any, None]]:
    """Admits a call as `admit` does, and counts it until it ends in its tenant's account, where that has a bound.
    Raises Overloaded, too, while the tenant has as many open as it may.
    """

    async def admit_and_count(method: str, context: Any) -> None:
        await admit(method, context)
        account = accounts.with_bounded_calls(tenant_of_call())
        if account is not None:
            # A call that resumes a stream may come before the broken one was missed.
            account.check_count("max_calls", account.calls, retry_delay_s=RETRY_DELAY_S)
            account.calls += 1
            context.add_done_callback(partial(_leave, account))

    return admit_and_count


def _leave(account: Account, _: object) -> None:
    account.calls -= 1
