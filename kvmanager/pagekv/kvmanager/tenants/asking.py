"""The tenant that a call is for, and checks of its permissions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagekv.common.errors import InvalidRequest, PermissionDenied
from pagekv.kvmanager.access.identity import ANY_TENANT
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.kvmanager.tenants.limits import SharedNamespace


@dataclass(frozen=True, slots=True)
class Asking:
    """A tenant with its account. The default is the one tenant of a manager without identities."""

    tenant: Tenant = NO_TENANT
    account: Account = field(default_factory=lambda: Account(NO_TENANT))
    namespaces: Mapping[str, SharedNamespace] = field(default_factory=dict)

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest for a priority that the tenant may not have."""
        bounds = self.account.limits.priorities
        if bounds is not None and not bounds[0] <= priority <= bounds[1]:
            raise InvalidRequest("priority", f"must be from {bounds[0]} to {bounds[1]} for your tenant, got {priority}")

    def check_adapter(self, adapter: str) -> None:
        """Raises PermissionDenied for an adapter that the tenant may not use; "" is none."""
        allowed = self.account.limits.adapters
        if adapter and allowed is not None and adapter not in allowed:
            raise PermissionDenied(f"adapter: your tenant may not use {adapter[:64]!r}")

    def check_text(self, num_bytes: int) -> None:
        """Counts text that will be tokenised. Raises Overloaded while earlier texts exceed the tenant's rate."""
        self.account.check_text()
        self.account.text.take(num_bytes)

    def cache_identity(self, namespace: str, read: bool | None = None, write: bool | None = None) -> CacheIdentity:
        """The cache identity of prompts in a namespace: the tenant's own namespace of this name, unless there is a
        shared one. `read` and `write`: whether the request wants to do so; None: as far as the tenant may. Raises
        PermissionDenied if the tenant may not.
        """
        shared = self.namespaces.get(namespace) if self.tenant.name else None
        if shared is None:
            return CacheIdentity(namespace, read=read is not False, write=write is not False, tenant=self.tenant.name)
        may_read, may_write = (bool({self.tenant.name, ANY_TENANT} & names) for names in (shared.read, shared.write))
        for asked, may, verb in ((read, may_read, "read"), (write, may_write, "write")):
            if asked and not may:
                raise PermissionDenied(f"cache.{verb}: your tenant may not {verb} the shared namespace {namespace!r}")
        if not may_read and not may_write:
            raise PermissionDenied(f"cache.namespace: your tenant may not use the shared namespace {namespace!r}")
        return CacheIdentity(namespace, read=may_read and read is not False, write=may_write and write is not False)
