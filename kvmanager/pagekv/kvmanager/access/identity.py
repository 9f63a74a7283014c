"""A caller as the manager knows it: a name and roles."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Calls that a caller may make. No role contains another: an operator that also generates has both."""

    # The caller's own prompts: Generate, Abort of own requests, Tokenize, Detokenize, GetModelInfo, prefix lookups.
    GENERATE = "generate"
    # Statistics and metrics, which have no content of prompts.
    OBSERVE = "observe"
    # Everybody's requests and blocks: lists, watches, pins, resets, Abort of any request.
    OPERATE = "operate"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller that has proven its name. Names of tokens begin with `jwt:`, which names in files cannot."""

    name: str
    roles: frozenset[Role]
