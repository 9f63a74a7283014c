"""The identities file: API keys by their digests, client certificates by their subjects, an issuer of tokens, and
the identity of callers that come through a gateway.

The file is read as a whole and checked field by field. Errors name the file and the field, and quote no secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pagekv.common.loopback import is_loopback
from pagekv.kvmanager.access.certificates import normal_subject
from pagekv.kvmanager.access.identity import ANY_TENANT, GATEWAY, TENANT_NAME, Identity, Role
from pagekv.kvmanager.access.toml_fields import check_names, kind_of, named, quoted, typed
from pagekv.kvmanager.access.toml_file import TomlFileError, read_toml

MAX_IDENTITIES = 10_000
MAX_TEXT_CHARACTERS = 1024
MAX_LEEWAY_S = 300
DEFAULT_LEEWAY_S = 60
DEFAULT_ROLES_CLAIM = "roles"
# Fields that every identity may have, besides its proof.
_OF_IDENTITIES = ("roles", "tenant", "act_for")
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """The one issuer of JSON Web Tokens. `jwks` is its key set: the path of a file, or a URL."""

    issuer: str
    audience: str
    jwks: Path | str
    roles_claim: str = DEFAULT_ROLES_CLAIM
    leeway_s: int = DEFAULT_LEEWAY_S
    # The claim that names a token's tenant; "": the tenant is the caller's name.
    tenant_claim: str = ""


@dataclass(frozen=True, slots=True)
class Identities:
    """A checked file: API keys by the 32 bytes of their SHA-256, certificates by their normalised subject."""

    keys: Mapping[bytes, Identity]
    certificates: Mapping[str, Identity]
    jwt: JwtSettings | None = None
    # The identity of callers that show none at the gateway's own address.
    gateway: Identity | None = None


def read_identities(path: Path) -> Identities:
    """The identities in a file. Raises TomlFileError, which names the flag and the file."""
    try:
        document = read_toml(path, secret=True)
        check_names("", document, ("keys", "certificates", "jwt", GATEWAY))
        keys, certificates = (typed(name, document.get(name, {}), dict) for name in ("keys", "certificates"))
        count = len(keys) + len(certificates)
        if count > MAX_IDENTITIES:
            raise TomlFileError(f"must have at most {MAX_IDENTITIES} identities, has {count}")
        both = sorted(keys.keys() & certificates.keys())
        if both:
            raise TomlFileError(f"certificates.{named(both[0])}: the name is taken by keys.{named(both[0])}")
        jwt = _read_jwt(document["jwt"], path.parent) if "jwt" in document else None
        gateway = _read_gateway(document[GATEWAY], keys, certificates) if GATEWAY in document else None
        if not count and jwt is None and gateway is None:
            raise TomlFileError(
                f"must have one identity at least: a table [keys.NAME], [certificates.NAME], [jwt] or [{GATEWAY}]"
            )
        return Identities(_read_keys(keys), _read_certificates(certificates), jwt, gateway)
    except TomlFileError as error:
        remedy = "; pagekv keys add makes such a file" if isinstance(error.__cause__, FileNotFoundError) else ""
        raise TomlFileError(f"--identities {path}: {error}{remedy}") from error


def _read_keys(tables: dict[str, Any]) -> dict[bytes, Identity]:
    keys: dict[bytes, Identity] = {}
    for name, value in tables.items():
        field, table = _identity_table("keys", name, value, "sha256")
        text = typed(f"{field}.sha256", table.get("sha256"), str)
        if not _DIGEST.fullmatch(text):
            # The text is never quoted, because it may be the key itself.
            raise TomlFileError(
                f"{field}.sha256: must be the 64 hexadecimal digits of the key's SHA-256, got {len(text)} characters"
            )
        digest = bytes.fromhex(text)
        if digest in keys:
            raise TomlFileError(f"{field}.sha256: is also that of keys.{keys[digest].name}; keys must differ")
        keys[digest] = _read_identity(field, name, table)
    return keys


def _read_certificates(tables: dict[str, Any]) -> dict[str, Identity]:
    certificates: dict[str, Identity] = {}
    for name, value in tables.items():
        field, table = _identity_table("certificates", name, value, "subject")
        text = _text(f"{field}.subject", table.get("subject"))
        try:
            subject = normal_subject(text)
        except ValueError as error:
            raise TomlFileError(
                f"{field}.subject: must be a whole subject as RFC 4514 writes it, such as CN=alice,O=example, "
                f"got {quoted(text)}"
            ) from error
        if subject in certificates:
            raise TomlFileError(
                f"{field}.subject: is also that of certificates.{certificates[subject].name}; subjects must differ"
            )
        certificates[subject] = _read_identity(field, name, table)
    return certificates


def _read_gateway(value: Any, *named: dict[str, Any]) -> Identity:
    """The gateway's identity. It has the name of its table, which no key and no certificate in `named` may have."""
    table = typed(GATEWAY, value, dict)
    check_names(GATEWAY, table, _OF_IDENTITIES)
    if any(GATEWAY in tables for tables in named):
        raise TomlFileError(f"{GATEWAY}: the name is taken by a key or a certificate")
    return _read_identity(GATEWAY, GATEWAY, table)


def _read_jwt(value: Any, folder: Path) -> JwtSettings:
    table = typed("jwt", value, dict)
    check_names("jwt", table, ("issuer", "audience", "jwks", "roles_claim", "tenant_claim", "leeway_s"))
    leeway_s = typed("jwt.leeway_s", table.get("leeway_s", DEFAULT_LEEWAY_S), int)
    if not 0 <= leeway_s <= MAX_LEEWAY_S:
        raise TomlFileError(f"jwt.leeway_s: must be from 0 to {MAX_LEEWAY_S}, got {leeway_s}")
    return JwtSettings(
        issuer=_text("jwt.issuer", table.get("issuer")),
        audience=_text("jwt.audience", table.get("audience")),
        jwks=_read_jwks(_text("jwt.jwks", table.get("jwks")), folder),
        roles_claim=_text("jwt.roles_claim", table.get("roles_claim", DEFAULT_ROLES_CLAIM)),
        tenant_claim=_text("jwt.tenant_claim", table["tenant_claim"]) if "tenant_claim" in table else "",
        leeway_s=leeway_s,
    )


def _read_jwks(text: str, folder: Path) -> Path | str:
    """A path, or a URL whose answer nobody on the network can replace: https, or http to loopback."""
    if "://" not in text:
        return folder / text
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        valid = bool(host) and parts.port != 0 and "@" not in parts.netloc and not parts.fragment and text.isascii()
    except ValueError:
        valid = False
    if not valid or " " in text or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))):
        # A URL that may contain a password is not quoted.
        shown = quoted(text) if "@" not in text else "one with a user or password"
        raise TomlFileError(
            f"jwt.jwks: must be the path of a file or an https URL, or http to a loopback address, got {shown}"
        )
    return text


def _read_identity(field: str, name: str, table: dict[str, Any]) -> Identity:
    """The identity in a table, without its proof."""
    roles = _read_roles(field, table.get("roles"))
    tenant = _tenant(f"{field}.tenant", table.get("tenant", name))
    if (Role.ACT_FOR in roles) != ("act_for" in table):
        words = "must list tenants, for the role act-for" if Role.ACT_FOR in roles else "is only for the role act-for"
        raise TomlFileError(f"{field}.act_for: {words}")
    return Identity(
        name, roles, tenant, _read_act_for(f"{field}.act_for", table["act_for"]) if "act_for" in table else frozenset()
    )


def _read_act_for(field: str, value: Any) -> frozenset[str]:
    listed = typed(field, value, list)
    if not listed:
        raise TomlFileError(f'{field}: must have one tenant at least, or be ["{ANY_TENANT}"] for any, is empty')
    if listed == [ANY_TENANT]:
        return frozenset(listed)
    return frozenset(_tenant(f"{field}[{index}]", tenant) for index, tenant in enumerate(listed))


def _tenant(field: str, value: Any) -> str:
    text = typed(field, value, str)
    if not TENANT_NAME.fullmatch(text):
        raise TomlFileError(f"{field}: must be 1 to 64 characters of [A-Za-z0-9._-], got {quoted(text)}")
    return text


def _read_roles(field: str, value: Any) -> frozenset[Role]:
    names = typed(f"{field}.roles", value, list)
    known = [role.value for role in Role]
    for index, name in enumerate(names):
        if name not in known:
            shown = quoted(name) if isinstance(name, str) else kind_of(name)
            raise TomlFileError(f"{field}.roles[{index}]: must be one of {', '.join(known)}, got {shown}")
    if not names:
        raise TomlFileError(f"{field}.roles: must have one of {', '.join(known)} at least, is empty")
    return frozenset(map(Role, names))


def _identity_table(kind: str, name: str, value: Any, proof: str) -> tuple[str, dict[str, Any]]:
    """The path of an identity's table, and the table."""
    # A name is also the tenant's if the table names no tenant.
    if not TENANT_NAME.fullmatch(name):
        raise TomlFileError(f"{kind}: names must be 1 to 64 characters of [A-Za-z0-9._-], got {quoted(name)}")
    # TOML splits [keys.a.b] at each point, so a name with points is written between quotes.
    field = f'{kind}."{name}"' if "." in name else f"{kind}.{name}"
    table = typed(field, value, dict)
    check_names(field, table, (proof, *_OF_IDENTITIES))
    return field, table


def _text(field: str, value: Any) -> str:
    text = typed(field, value, str)
    if not 1 <= len(text) <= MAX_TEXT_CHARACTERS or not text.isprintable():
        raise TomlFileError(
            f"{field}: must be from 1 to {MAX_TEXT_CHARACTERS} printable characters, got {quoted(text)}"
        )
    return text
