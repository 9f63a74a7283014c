"""The tenant that a call is for: the caller's own, or one that the call names and the caller may act for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagekv.common.errors import InvalidRequest, PermissionDenied
from pagekv.kvmanager.access.identity import ANY_TENANT, TENANT_NAME, Identity, Role

# Key of gRPC's metadata, and name of HTTP's header, where case does not matter.
TENANT = "pagekv-tenant"


def acting(known: Identity, named: Sequence[str]) -> Identity:
    """The identity for a call that names these tenants; most calls name none. Raises PermissionDenied if the caller may
    not act for the tenant, and InvalidRequest if there is more than one tenant or the text is no tenant's name.
    """
    if not named:
        return known
    # Checked first, so that callers without the role learn nothing about names.
    if Role.ACT_FOR not in known.roles:
        held = ", ".join(sorted(known.roles)) or "none"
        raise PermissionDenied(f"{TENANT} needs the role {Role.ACT_FOR}; {known.name} has {held}")
    if len(named) > 1:
        raise InvalidRequest(TENANT, "must be sent once")
    tenant = named[0]
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequest(TENANT, f"must be 1 to 64 characters of [A-Za-z0-9._-], got {tenant[:64]!r}")
    if not known.act_for & {ANY_TENANT, tenant}:
        raise PermissionDenied(f"{known.name} may not act for the tenant {tenant}")
    return replace(known, tenant=tenant, acting=True)
