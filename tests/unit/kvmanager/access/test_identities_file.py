"""The identities file: what it says, and each way in which it is refused, with file and field."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
from support.documentation import ROOT, fenced

from pagekv.kvmanager.access.identities_file import MAX_IDENTITIES, JwtSettings, read_identities
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.toml_file import MAX_FILE_BYTES, TomlFileError

DIGEST = hashlib.sha256(b"the key").hexdigest()
KEY = f'[keys.alice]\nsha256 = "{DIGEST}"\nroles = ["generate"]\n'
ACTING = KEY.replace("generate", "act-for")
CERTIFICATE = '[certificates.prometheus]\nsubject = "CN=prometheus"\nroles = ["observe"]\n'
GATEWAY = '[gateway]\nroles = ["generate"]\n'
JWT = '[jwt]\nissuer = "https://login.example"\naudience = "pagekv"\njwks = "jwks.json"\n'


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "identities.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def refusal(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    """The words behind the file's name."""
    path = written(folder, text, mode)
    with pytest.raises(TomlFileError) as caught:
        read_identities(path)
    words = str(caught.value)
    assert words.startswith(f"--identities {path}: ")
    assert "\n" not in words
    assert len(words) < len(str(path)) + 400
    return words.removeprefix(f"--identities {path}: ")


def test_the_whole_file(tmp_path: Path) -> None:
    text = KEY.replace(DIGEST, DIGEST.upper()) + CERTIFICATE + JWT
    found = read_identities(written(tmp_path, text))
    assert found.keys == {bytes.fromhex(DIGEST): Identity("alice", frozenset({Role.GENERATE}))}
    assert found.certificates == {"CN=prometheus": Identity("prometheus", frozenset({Role.OBSERVE}))}
    settings = JwtSettings("https://login.example", "pagekv", tmp_path / "jwks.json", "roles", 60)
    assert found.jwt == settings


def test_the_example_of_the_documentation_is_taken(tmp_path: Path) -> None:
    example, _ = fenced(ROOT / "docs" / "deployment.md", "toml")
    found = read_identities(written(tmp_path, example))
    assert [(each.name, each.tenant) for each in (*found.keys.values(), *found.certificates.values())] == [
        ("alice", "research"),
        ("portal", "portal"),
        ("prometheus", "prometheus"),
    ]
    assert found.jwt is not None
    assert found.gateway == Identity("gateway", frozenset({Role.GENERATE}), "web")


def test_the_gateway_alone_makes_a_file(tmp_path: Path) -> None:
    found = read_identities(written(tmp_path, GATEWAY.replace("generate", "act-for") + 'act_for = ["*"]\n'))
    assert found.gateway == Identity("gateway", frozenset({Role.ACT_FOR}), "gateway", frozenset({"*"}))
    assert not found.keys
    assert not found.certificates
    assert read_identities(written(tmp_path, KEY)).gateway is None


def test_optional_fields_of_tokens(tmp_path: Path) -> None:
    more = 'roles_claim = "https://example/roles"\nleeway_s = 0\n'
    found = read_identities(written(tmp_path, JWT.replace("jwks.json", "/etc/jwks.json") + more)).jwt
    assert found is not None
    assert (found.jwks, found.roles_claim, found.leeway_s) == (Path("/etc/jwks.json"), "https://example/roles", 0)


@pytest.mark.parametrize("url", ["https://login.example/keys?v=2", "http://127.0.0.1:8000/k", "http://localhost/k"])
def test_urls_of_key_sets(tmp_path: Path, url: str) -> None:
    found = read_identities(written(tmp_path, JWT.replace("jwks.json", url))).jwt
    assert found is not None
    assert found.jwks == url


def test_a_subject_is_normalised(tmp_path: Path) -> None:
    found = read_identities(written(tmp_path, CERTIFICATE.replace("CN=", "2.5.4.3=")))
    assert list(found.certificates) == ["CN=prometheus"]


def test_a_name_with_points_is_quoted(tmp_path: Path) -> None:
    found = read_identities(written(tmp_path, KEY.replace("keys.alice", 'keys."alice.smith"')))
    assert [identity.name for identity in found.keys.values()] == ["alice.smith"]


REFUSED = [
    ("", "must have one identity at least"),
    ("[keys]\n[certificates]\n", "must have one identity at least"),
    (b"\xff\xfe", "must be UTF-8, byte 0 is not"),
    ("keys = [", "must be TOML: "),
    ("a = " + "[" * 100_000, "must be TOML with fewer nested levels"),
    ("#" * (MAX_FILE_BYTES + 1), f"must have at most {MAX_FILE_BYTES} bytes"),
    (KEY + KEY, "must be TOML: .*keys"),
    ("[key.alice]\n", "key: is not known; did you mean keys[?]"),
    ('["a\\nb"]\n', "'a\\\\nb': is not known; there are keys, certificates, jwt"),
    ("keys = 3\n", "keys: must be a table, got a number"),
    ("[keys]\nalice = 1979-05-27\n", "keys.alice: must be a table, got a date or time"),
    ("[keys.alice.smith]\n", "keys.alice.smith: is not known; there are sha256, roles"),
    (KEY.replace("sha256", "sha265"), "keys.alice.sha265: is not known; did you mean sha256[?]"),
    (KEY.replace("keys.alice", 'keys."a b"'), "keys: names must be 1 to 64 characters of .*, got 'a b'"),
    (KEY.replace("alice", "a" * 65), r"keys: names must be .* \(65 characters\)"),
    (KEY.replace("keys.alice", 'keys.""'), "keys: names must be .* got ''"),
    (KEY.replace("keys.alice", 'keys."alice\\n"'), "keys: names must be .* got 'alice\\\\n'"),
    ('[keys.alice]\nroles = ["generate"]\n', "keys.alice.sha256: must be a text, is not there"),
    (KEY.replace(f'"{DIGEST}"', "5"), "keys.alice.sha256: must be a text, got a number"),
    (
        KEY.replace(DIGEST, "pk-secret"),
        "keys.alice.sha256: must be the 64 hexadecimal digits of the key's SHA-256, got 9 characters",
    ),
    (KEY.replace(DIGEST, DIGEST[:-1] + "g"), "keys.alice.sha256: .* got 64 characters"),
    (KEY.replace('["generate"]', "[]"), "keys.alice.roles: must have one of generate, observe, operate"),
    (KEY.replace('["generate"]', '"generate"'), "keys.alice.roles: must be a list, got a text"),
    (KEY.replace("generate", "admin"), "keys.alice.roles.0.: must be one of .* got 'admin'"),
    (KEY.replace('["generate"]', '["observe", true]'), "keys.alice.roles.1.: must be one of .* got a boolean"),
    (KEY + "tenant = 5\n", "keys.alice.tenant: must be a text, got a number"),
    (KEY + 'tenant = "a b"\n', "keys.alice.tenant: must be 1 to 64 characters of .* got 'a b'"),
    (KEY + 'tenant = ""\n', "keys.alice.tenant: must be 1 to 64 characters"),
    (KEY + 'tenant = "*"\n', "keys.alice.tenant: must be 1 to 64 characters"),
    (KEY + 'act_for = ["a"]\n', "keys.alice.act_for: is only for the role act-for"),
    (KEY + "act_for = []\n", "keys.alice.act_for: is only for the role act-for"),
    (KEY.replace("generate", "act-for"), "keys.alice.act_for: must list tenants, for the role act-for"),
    (ACTING + "act_for = []\n", "keys.alice.act_for: must have one tenant at least, or be ..... for any, is empty"),
    (ACTING + 'act_for = "a"\n', "keys.alice.act_for: must be a list, got a text"),
    (ACTING + 'act_for = ["a", 1]\n', "keys.alice.act_for.1.: must be a text, got a number"),
    (ACTING + 'act_for = ["a", "*"]\n', "keys.alice.act_for.1.: must be 1 to 64 characters of .* got '[*]'"),
    (ACTING + 'act_for = ["jwt:a"]\n', "keys.alice.act_for.0.: must be 1 to 64 characters"),
    (KEY + KEY.replace("alice", "bob"), "keys.bob.sha256: is also that of keys.alice"),
    (KEY + CERTIFICATE.replace(".prometheus", ".alice"), "certificates.alice: the name is taken by keys.alice"),
    (CERTIFICATE.replace("CN=prometheus", "prometheus"), "certificates.prometheus.subject: .* got 'prometheus'"),
    (CERTIFICATE.replace("CN=prometheus", "CN="), "certificates.prometheus.subject: .* RFC 4514"),
    (
        CERTIFICATE + CERTIFICATE.replace(".prometheus", ".bob").replace("CN=", "2.5.4.3="),
        "certificates.bob.subject: is also that of certificates.prometheus",
    ),
    (CERTIFICATE.replace("subject", "sha256"), "certificates.prometheus.sha256: is not known; there are subject"),
    ("gateway = 1\n", "gateway: must be a table, got a number"),
    ("[gateway]\n", "gateway.roles: must be a list, is not there"),
    (GATEWAY + 'sha256 = "00"\n', "gateway.sha256: is not known; there are roles, tenant, act_for"),
    (GATEWAY + 'act_for = ["a"]\n', "gateway.act_for: is only for the role act-for"),
    (GATEWAY + KEY.replace("alice", "gateway"), "gateway: the name is taken by a key or a certificate"),
    (GATEWAY + CERTIFICATE.replace(".prometheus", ".gateway"), "gateway: the name is taken by a key or a certificate"),
    ("jwt = 1\n", "jwt: must be a table"),
    (JWT.replace("audience", "audiense"), "jwt.audiense: is not known; did you mean audience[?]"),
    (JWT.replace('"pagekv"', '""'), "jwt.audience: must be from 1 to 1024 printable characters, got ''"),
    (JWT.replace("pagekv", "x" * 1025), r"jwt.audience: .* \(1025 characters\)"),
    (JWT.replace("pagekv", "a\\nb"), "jwt.audience: .* got 'a\\\\nb'"),
    (JWT.replace('audience = "pagekv"\n', ""), "jwt.audience: must be a text, is not there"),
    (JWT + "leeway_s = 301\n", "jwt.leeway_s: must be from 0 to 300, got 301"),
    (JWT + "leeway_s = -1\n", "jwt.leeway_s: must be from 0 to 300, got -1"),
    (JWT + "leeway_s = true\n", "jwt.leeway_s: must be a number, got a boolean"),
    (JWT + 'tenant_claim = ""\n', "jwt.tenant_claim: must be from 1 to 1024"),
    (JWT + 'roles_claim = ["a"]\n', "jwt.roles_claim: must be a text, got a list"),
    (JWT.replace("jwks.json", "http://login.example/k"), "jwt.jwks: .* got 'http://login.example/k'"),
    (JWT.replace("jwks.json", "http://localhost.evil.example/k"), "jwt.jwks: must be the path of a file or an https"),
    (JWT.replace("jwks.json", "file:///etc/passwd"), "jwt.jwks: "),
    (JWT.replace("jwks.json", "https://"), "jwt.jwks: "),
    (JWT.replace("jwks.json", "https://[::1"), "jwt.jwks: "),
    (JWT.replace("jwks.json", "https://h:99999/"), "jwt.jwks: "),
    (JWT.replace("jwks.json", "https://h/a b"), "jwt.jwks: "),
    (JWT.replace("jwks.json", "https://me:secret@h/"), "jwt.jwks: .* got one with a user or password"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_is_refused_with_the_field(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert re.match(words, said := refusal(tmp_path, text)), said


def test_tenants_are_ones_own_or_shared_and_a_gateway_may_name_others(tmp_path: Path) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    text = (
        KEY.replace("keys.alice", 'keys."al.ice"')
        + ACTING.replace("alice", "gateway").replace(DIGEST, other)
        + 'tenant = "edge"\nact_for = ["team-a", "b"]\n'
        + CERTIFICATE
        + 'tenant = "edge"\n[certificates.all]\nsubject = "CN=all"\nroles = ["act-for"]\nact_for = ["*"]\n'
    )
    found = read_identities(written(tmp_path, text))
    gateway = Identity("gateway", frozenset({Role.ACT_FOR}), "edge", frozenset({"team-a", "b"}))
    assert found.keys == {
        bytes.fromhex(DIGEST): Identity("al.ice", frozenset({Role.GENERATE}), "al.ice"),
        bytes.fromhex(other): gateway,
    }
    assert found.certificates == {
        "CN=prometheus": Identity("prometheus", frozenset({Role.OBSERVE}), "edge"),
        "CN=all": Identity("all", frozenset({Role.ACT_FOR}), "all", frozenset({"*"})),
    }


def test_the_claim_of_a_tokens_tenant(tmp_path: Path) -> None:
    found = read_identities(written(tmp_path, JWT + 'tenant_claim = "https://example/tenant"\n'))
    assert found.jwt is not None
    assert found.jwt.tenant_claim == "https://example/tenant"


def test_a_key_in_clear_is_never_quoted(tmp_path: Path) -> None:
    assert "pk-secret" not in refusal(tmp_path, KEY.replace(DIGEST, "pk-secret"))
    assert "secret" not in refusal(tmp_path, JWT.replace("jwks.json", "https://me:secret@h/"))


def test_too_many_identities_are_refused(tmp_path: Path) -> None:
    text = "keys = {" + ",".join(f"k{n}={{}}" for n in range(MAX_IDENTITIES)) + "}\n[certificates.x]\n"
    assert refusal(tmp_path, text) == f"must have at most {MAX_IDENTITIES} identities, has {MAX_IDENTITIES + 1}"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_that_is_closed_to_others_is_read(tmp_path: Path, mode: int) -> None:
    assert read_identities(written(tmp_path, KEY, mode)).keys


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602, 0o610, 0o601])
def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    assert refusal(tmp_path, KEY, mode).endswith(f"(chmod 640 or 600), has {mode:03o}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TomlFileError, match=r"none.toml: cannot be read: No such file .*; pagekv keys add makes"):
        read_identities(tmp_path / "none.toml")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TomlFileError, match="must be a regular file"):
        read_identities(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(TomlFileError, match="must be a regular file"):
        read_identities(tmp_path / "pipe")


def test_a_link_is_followed_as_secrets_of_containers_need_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(written(tmp_path, KEY))
    assert read_identities(tmp_path / "link").keys
