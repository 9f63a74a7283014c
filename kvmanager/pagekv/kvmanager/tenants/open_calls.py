"""Calls of gRPC that a tenant has open at once, over all of its connections, and the bound on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pagekv.kvmanager.access.caller import tenant_of_call
from pagekv.kvmanager.tenants.accounts import Account, Accounts

RETRY_DELAY_S = 1.0


class OpenCalls:
    """Counts the open calls of tenants that have a bound on them, in their accounts."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def behind(self, admit: Callable[[str, Any], Awaitable[None]]) -> Callable[[str, Any], Coroutine[Any, Any, None]]:
        """Admits a call as `admit` does, and counts it until it ends. Raises Overloaded, too, while its tenant has as
        many open as it may.
        """

        async def admit_and_count(method: str, context: Any) -> None:
            await admit(method, context)
            account = self._accounts.with_bounded_calls(tenant_of_call())
            if account is not None:
                self._enter(account, context)

        return admit_and_count

    def _enter(self, account: Account, context: Any) -> None:
        # A call that resumes a stream may come before the broken one was missed.
        account.check_count("max_calls", account.calls, retry_delay_s=RETRY_DELAY_S)
        account.calls += 1

        def leave(_: object) -> None:
            account.calls -= 1

        context.add_done_callback(leave)
