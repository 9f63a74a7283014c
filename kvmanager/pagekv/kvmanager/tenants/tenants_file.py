"""The tenants file: limits by name, limits of tenants that are not named, and shared namespaces.

The file is read as a whole and checked field by field. Errors name the file and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pagekv.kvmanager.access.identity import ANY_TENANT, TENANT_NAME
from pagekv.kvmanager.access.toml_fields import check_names, named, quoted, typed
from pagekv.kvmanager.access.toml_file import TomlFileError, read_toml
from pagekv.kvmanager.tenants.limits import SharedNamespace, TenantLimits

# Most accounts of named and other tenants together. Each has a column of counters and an eviction order of its own.
MAX_TENANTS = 1000
MAX_NUMBER = 2**40
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_PRIORITY = 2**20
_COUNTS = {
    "max_running": 1,
    "max_waiting": 1,
    "tokens_per_minute": 1,
    "max_blocks": 1,
    "max_pinned_blocks": 0,
    "max_watchers": 0,
    "max_calls": 1,
    "tokenized_bytes_per_second": 1,
    "floor_blocks": 0,
}
# TOML takes [tenants.a.b] for a table b in the table of a.
_DOTTED = 'a tenant with a dot in its name stands in quotes, as [tenants."a.b"]'
_LIMITS = tuple(field.name for field in fields(TenantLimits))


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """A checked file. `default`: the limits of every tenant that is not named; None: such a tenant is refused."""

    tenants: Mapping[str, TenantLimits]
    default: TenantLimits | None
    namespaces: Mapping[str, SharedNamespace]
    path: str = ""

    @property
    def num_floor_blocks(self) -> int:
        return sum(limits.floor_blocks for limits in self.tenants.values())


# Without a file: every caller that is let in has a tenant without limits of its own.
NO_FILE = TenantsFile(MappingProxyType({}), TenantLimits(), MappingProxyType({}))


def read_tenants(path: Path) -> TenantsFile:
    """The tenants in a file. Raises TomlFileError."""
    try:
        document = read_toml(path)
        check_names("", document, ("default", "tenants", "namespaces"))
        tables, shared = (typed(name, document.get(name, {}), dict) for name in ("tenants", "namespaces"))
        if len(tables) > MAX_TENANTS:
            raise TomlFileError(f"tenants: must be at most {MAX_TENANTS}, are {len(tables)}")
        tenants: dict[str, TenantLimits] = {}
        for name, table in tables.items():
            if not TENANT_NAME.fullmatch(name):
                raise TomlFileError(f"tenants: names must be 1 to 64 characters of [A-Za-z0-9._-], got {quoted(name)}")
            tenants[name] = _limits(f"tenants.{name}", table)
        default = _limits("default", document["default"]) if "default" in document else None
        if default is not None and default.floor_blocks:
            raise TomlFileError("default.floor_blocks: must be 0, because the number of tenants is not known")
        if default is None and not tenants:
            raise TomlFileError("must have one tenant at least: a table [tenants.NAME] or [default]")
        namespaces = {name: _namespace(f"namespaces.{named(name)}", table) for name, table in shared.items()}
        return TenantsFile(tenants, default, namespaces, str(path))
    except TomlFileError as error:
        raise TomlFileError(f"--tenants {path}: {error}") from error


def _limits(field: str, value: Any) -> TenantLimits:
    table = typed(field, value, dict)
    check_names(field, table, _LIMITS, _DOTTED)
    found: dict[str, Any] = {}
    for name, least in _COUNTS.items():
        if name in table:
            found[name] = _count(f"{field}.{name}", table[name], least, MAX_NUMBER)
    if "weight" in table:
        weight = table["weight"]
        if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise TomlFileError(f"{field}.weight: must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, got {_shown(weight)}")
        found["weight"] = float(weight)
    if "priorities" in table:
        found["priorities"] = _priorities(f"{field}.priorities", table["priorities"])
    if "adapters" in table:
        found["adapters"] = _names(f"{field}.adapters", table["adapters"])
    return TenantLimits(**found)


def _priorities(field: str, value: Any) -> tuple[int, int]:
    bounds = typed(field, value, list)
    if len(bounds) != 2:
        raise TomlFileError(f"{field}: must be two numbers, the lowest and the highest, has {len(bounds)}")
    low, high = (_count(f"{field}[{at}]", bound, -MAX_PRIORITY, MAX_PRIORITY) for at, bound in enumerate(bounds))
    if low > high:
        raise TomlFileError(f"{field}: must be the lowest and then the highest, got {low} and {high}")
    return low, high


def _namespace(field: str, value: Any) -> SharedNamespace:
    table = typed(field, value, dict)
    check_names(field, table, ("read", "write"))
    read, write = (_names(f"{field}.{name}", table.get(name, [])) for name in ("read", "write"))
    for name in sorted(read | write):
        if name != ANY_TENANT and not TENANT_NAME.fullmatch(name):
            raise TomlFileError(f"{field}: must name tenants, or {ANY_TENANT!r} for all, got {quoted(name)}")
    if not read | write:
        raise TomlFileError(f"{field}: must have a tenant that may read or write")
    return SharedNamespace(read, write)


def _names(field: str, value: Any) -> frozenset[str]:
    names = typed(field, value, list)
    for at, name in enumerate(names):
        typed(f"{field}[{at}]", name, str)
    return frozenset(names)


def _count(field: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise TomlFileError(f"{field}: must be a whole number from {least} to {most}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        # Python writes no numbers of thousands of digits.
        return "a number that is too long to be shown"
    return text if len(text) <= 64 else f"{text[:64]}..."
