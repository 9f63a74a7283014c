"""A caller as the manager knows it: a name, roles and a tenant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

# The form of a tenant's name in files, tokens and calls.
TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Stands for every tenant, in lists of tenants.
ANY_TENANT = "*"
# The identity of callers that show none at the gateway's own address: its name, and the name of its table in the file.
GATEWAY = "gateway"


class Role(StrEnum):
    """Calls that a caller may make. No role contains another: an operator that also generates has both."""

    # The caller's own prompts: Generate, Abort of own requests, Tokenize, Detokenize, GetModelInfo, prefix lookups.
    GENERATE = "generate"
    # Statistics and metrics, which have no content of prompts.
    OBSERVE = "observe"
    # Everybody's requests and blocks: lists, watches, pins, resets, Abort of any request.
    OPERATE = "operate"
    # Making calls for another tenant, which the call names: for gateways, which have callers of their own.
    ACT_FOR = "act-for"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that has proved its name. Names from tokens begin with `jwt:`, which names in files cannot.

    `tenant`: the tenant that its calls are for; "" means the caller's name. `act_for`: with the role ACT_FOR, the
    tenants that its calls may name instead; ANY_TENANT among them means all. `acting`: the call has named a tenant.
    """

    name: str
    roles: frozenset[Role]
    tenant: str = ""
    act_for: frozenset[str] = frozenset()
    acting: bool = False

    def __post_init__(self) -> None:
        if not self.tenant:
            object.__setattr__(self, "tenant", self.name)
