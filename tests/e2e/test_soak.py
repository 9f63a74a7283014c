"""A minute of `make soak`: nothing is held at its end, and no tenant gets another's."""

from __future__ import annotations

import pytest
from chaos.soak import soak

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]


def test_two_tenants_and_an_adversary_with_kills() -> None:
    account = soak(seconds=40, seed=1, kill_every_s=5, warm_up_s=8)
    print(account.table())
    # Of so short a life memory says nothing.
    assert [what for what in account.problems if "grew from" not in what] == []
    assert account.calls["alice: whole answers"] > 0
    assert account.calls["bob: whole answers"] > 0
    assert account.calls["manager killed"] > 0
    assert account.calls["executor killed"] > 0
    assert account.calls["mallory pries: PERMISSION_DENIED"] > 0
