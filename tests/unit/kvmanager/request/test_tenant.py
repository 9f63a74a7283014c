"""Tests of tenants as requests name them."""

from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant


def test_a_request_without_an_identity_is_that_of_no_tenant() -> None:
    command = GenerateCommand("id", [1], SamplingParams())

    assert command.tenant is NO_TENANT


def test_tenants_are_equal_by_name_and_number() -> None:
    assert Tenant("alice", 1) == Tenant("alice", 1)
    assert Tenant("alice", 1) != Tenant("bob", 1)
