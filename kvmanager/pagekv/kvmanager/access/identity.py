"""A caller as the manager knows it: a name, roles and a tenant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

# A tenant as files, tokens and calls name it.
TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# In the tenants that an identity may act for.
ANY_TENANT = "*"
# The identity of whoever shows none at the gateway's own address: its name, and its table in the file.
GATEWAY = "gateway"


class Role(StrEnum):
    """Calls that a caller may make. No role contains another: an operator that also generates has both."""

    # The caller's own prompts: Generate, Abort of own requests, Tokenize, Detokenize, GetModelInfo, prefix lookups.
    GENERATE = "generate"
    # Statistics and metrics, which have no content of prompts.
    OBSERVE = "observe"
    # Everybody's requests and blocks: lists, watches, pins, resets, Abort of any request.
    OPERATE = "operate"
    # Naming another tenant, for which the call is then made: for gateways, which have callers of their own.
    ACT_FOR = "act-for"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that has proven its name. Names of tokens begin with `jwt:`, which names in files cannot.

    `tenant`: for whom its calls are made; "" makes it the name. `act_for`: the tenants that calls may name instead,
    with the role ACT_FOR; ANY_TENANT among them means all. `acting`: the call has named one.
    """

    name: str
    roles: frozenset[Role]
    tenant: str = ""
    act_for: frozenset[str] = frozenset()
    acting: bool = False

    def __post_init__(self) -> None:
        if not self.tenant:
            object.__setattr__(self, "tenant", self.name)
