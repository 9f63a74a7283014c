"""The tenants file: its values, and the words for a wrong one."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.documentation import ROOT, fenced

from pagekv.kvmanager.access.toml_fields import quoted
from pagekv.kvmanager.access.toml_file import MAX_FILE_BYTES, TomlFileError
from pagekv.kvmanager.tenants.limits import SharedNamespace, TenantLimits
from pagekv.kvmanager.tenants.tenants_file import (
    MAX_NUMBER,
    MAX_PRIORITY,
    MAX_TENANTS,
    NO_FILE,
    TenantsFile,
    read_tenants,
)

WHOLE = """
[default]
weight = 0.5
max_running = 2

[tenants.team-a]
weight = 4
max_running = 8
max_waiting = 1
tokens_per_minute = 100_000
max_blocks = 500
max_pinned_blocks = 0
max_watchers = 0
max_calls = 64
tokenized_bytes_per_second = 1_000_000
priorities = [-1, 3]
adapters = ["", "formal"]
floor_blocks = 100

[tenants."team.b"]
floor_blocks = 20

[namespaces.handbook]
read = ["*"]
write = ["team-a"]
"""
COUNTS = {
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
LIMITS = ", ".join(field.name for field in fields(TenantLimits))


def read(folder: Path, text: str | bytes) -> TenantsFile:
    path = folder / "tenants.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_tenants(path)


def refusal(folder: Path, text: str | bytes) -> str:
    """The one line that the text is refused with, without the file's path before it."""
    with pytest.raises(TomlFileError) as caught:
        read(folder, text)
    words = str(caught.value)
    assert words.startswith(f"--tenants {folder / 'tenants.toml'}: ")
    assert words.isprintable()
    assert len(words) < 600
    return words.removeprefix(f"--tenants {folder / 'tenants.toml'}: ")


def test_every_field(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert found.default == TenantLimits(weight=0.5, max_running=2)
    assert found.tenants == {
        "team-a": TenantLimits(
            weight=4.0, max_running=8, max_waiting=1, tokens_per_minute=100_000, max_blocks=500, max_pinned_blocks=0,
            max_watchers=0, max_calls=64, tokenized_bytes_per_second=1_000_000, priorities=(-1, 3),
            adapters=frozenset({"", "formal"}), floor_blocks=100,
        ),
        "team.b": TenantLimits(floor_blocks=20),
    }  # fmt: skip  # several a line: one each would fill a screen
    assert type(found.tenants["team-a"].weight) is float
    assert found.namespaces == {"handbook": SharedNamespace(frozenset("*"), frozenset({"team-a"}))}
    assert found.num_floor_blocks == 120


def test_limits_are_not_inherited_from_the_default(tmp_path: Path) -> None:
    found = read(tmp_path, "[default]\nmax_running = 2\n[tenants.a]\nweight = 2")
    assert found.tenants["a"].max_running is None


def test_no_file_lets_every_tenant_in() -> None:
    assert (dict(NO_FILE.tenants), NO_FILE.default, NO_FILE.num_floor_blocks) == ({}, TenantLimits(), 0)


def test_a_default_alone_and_tenants_alone(tmp_path: Path) -> None:
    assert read(tmp_path, "[default]").tenants == {}
    assert read(tmp_path, "[tenants.a]").default is None


@pytest.mark.parametrize("table", ["default", "tenants.a"])
@pytest.mark.parametrize(("name", "least"), COUNTS.items())
def test_bounds_of_counts(tmp_path: Path, table: str, name: str, least: int) -> None:
    for value in (least, MAX_NUMBER):
        if (table, name) != ("default", "floor_blocks"):
            found = read(tmp_path, f"[{table}]\n{name} = {value}")
            assert getattr(found.tenants.get("a", found.default), name) == value
    for wrong, shown in (
        (f"{least - 1}", f"{least - 1}"),
        (f"{MAX_NUMBER + 1}", f"{MAX_NUMBER + 1}"),
        ("1.0", "1.0"),
        ("true", "True"),
        ('"5"', "'5'"),
        ("[1]", "[1]"),
        ("{}", "{}"),
        ("inf", "inf"),
    ):
        words = f"{table}.{name}: must be a whole number from {least} to {MAX_NUMBER}, got {shown}"
        assert refusal(tmp_path, f"[{table}]\n{name} = {wrong}") == words


def test_every_count_is_a_limit_and_every_limit_is_tested() -> None:
    assert {field.name for field in fields(TenantLimits)} == COUNTS.keys() | {"weight", "priorities", "adapters"}


@pytest.mark.parametrize(("text", "weight"), [("0.001", 0.001), ("1000", 1000.0), ("1000.0", 1000.0), ("3", 3.0)])
def test_a_weight_is_a_number_within_its_bounds(tmp_path: Path, text: str, weight: float) -> None:
    assert read(tmp_path, f"[tenants.a]\nweight = {text}").tenants["a"].weight == weight


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0", "0"), ("0.0009", "0.0009"), ("1000.1", "1000.1"), ("-1", "-1"), ("nan", "nan"), ("inf", "inf"),
        ("-inf", "-inf"), ("true", "True"), ('"1"', "'1'"), (HUGE, f"{HUGE[:64]}..."),
    ],
)  # fmt: skip  # several a line: one each would fill a screen
def test_any_other_weight_is_refused(tmp_path: Path, text: str, shown: str) -> None:
    words = f"tenants.a.weight: must be from 0.001 to 1000, got {shown}"
    assert refusal(tmp_path, f"[tenants.a]\nweight = {text}") == words


def test_priorities_are_the_lowest_and_the_highest(tmp_path: Path) -> None:
    for low, high in ((0, 0), (-MAX_PRIORITY, MAX_PRIORITY)):
        found = read(tmp_path, f"[tenants.a]\npriorities = [{low}, {high}]")
        assert found.tenants["a"].priorities == (low, high)
    field, bounds = "tenants.a.priorities", f"must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
    for wrong, words in (
        ("3", ": must be a list, got a number"),
        ("[]", ": must be two numbers, the lowest and the highest, has 0"),
        ("[1, 2, 3]", ": must be two numbers, the lowest and the highest, has 3"),
        ("[2, 1]", ": must be the lowest and then the highest, got 2 and 1"),
        (f"[{-MAX_PRIORITY - 1}, 1]", f"[0]: {bounds}, got {-MAX_PRIORITY - 1}"),
        (f"[0, {MAX_PRIORITY + 1}]", f"[1]: {bounds}, got {MAX_PRIORITY + 1}"),
        ("[0, 1.5]", f"[1]: {bounds}, got 1.5"),
        ("[false, 1]", f"[0]: {bounds}, got False"),
    ):
        assert refusal(tmp_path, f"[tenants.a]\npriorities = {wrong}") == field + words


def test_adapters_are_a_list_of_names(tmp_path: Path) -> None:
    assert read(tmp_path, "[tenants.a]\nadapters = []").tenants["a"].adapters == frozenset()
    assert refusal(tmp_path, '[tenants.a]\nadapters = "x"') == "tenants.a.adapters: must be a list, got a text"
    assert (
        refusal(tmp_path, '[tenants.a]\nadapters = ["x", 3]') == "tenants.a.adapters[1]: must be a text, got a number"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenant.a]", "tenant: is not known; did you mean tenants?"),
        ("[x]", "x: is not known; there are default, tenants, namespaces"),
        ("[tenants.a]\nmax_runing = 1", "tenants.a.max_runing: is not known; did you mean max_running?"),
        ("[default]\nqqq = 1", f"default.qqq: is not known; there are {LIMITS}"),
        (
            "[tenants.a.b]\nmax_running = 1",
            f'tenants.a.b: is not known; a tenant with a dot in its name stands in quotes, as [tenants."a.b"]; '
            f"there are {LIMITS}",
        ),
        ("[default]\n[namespaces.n]\nreads = []", "namespaces.n.reads: is not known; did you mean read?"),
        ('[default]\n"weight\\n" = 1', "default.'weight\\n': is not known; did you mean weight?"),
        (
            f"[tenants.a]\n{'y' * 99} = 1",
            f"tenants.a.{'y' * 64!r}... (99 characters): is not known; there are {LIMITS}",
        ),
        ("default = 3", "default: must be a table, got a number"),
        ("tenants = []", "tenants: must be a table, got a list"),
        ("[tenants]\na = 1", "tenants.a: must be a table, got a number"),
        ('namespaces = "x"', "namespaces: must be a table, got a text"),
        ("", "must have one tenant at least: a table [tenants.NAME] or [default]"),
        ("[tenants]", "must have one tenant at least: a table [tenants.NAME] or [default]"),
        ('[namespaces.n]\nread=["*"]', "must have one tenant at least: a table [tenants.NAME] or [default]"),
    ],
)  # fmt: skip  # laid out as a table
def test_wrong_names_and_tables(tmp_path: Path, text: str, words: str) -> None:
    assert refusal(tmp_path, text) == words


@pytest.mark.parametrize("name", ["", "*", "a b", "ä", "a/b", "x" * 65, "a\\nb"])
def test_wrong_names_of_tenants(tmp_path: Path, name: str) -> None:
    got = quoted(name.replace("\\n", "\n"))
    words = f"tenants: names must be 1 to 64 characters of [A-Za-z0-9._-], got {got}"
    assert refusal(tmp_path, f'[tenants."{name}"]') == words


def test_the_default_has_no_floor(tmp_path: Path) -> None:
    words = "default.floor_blocks: must be 0, because the number of tenants is not known"
    assert refusal(tmp_path, "[default]\nfloor_blocks = 1") == words
    assert read(tmp_path, "[default]\nfloor_blocks = 0").default == TenantLimits()


def test_as_many_tenants_as_there_can_be(tmp_path: Path) -> None:
    most = "".join(f"[tenants.t{number}]\n" for number in range(MAX_TENANTS))
    assert len(read(tmp_path, most).tenants) == MAX_TENANTS
    assert refusal(tmp_path, f"{most}[tenants.one-more]") == "tenants: must be at most 1000, are 1001"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("read = 'a'", ".read: must be a list, got a text"),
        ("write = [3]", ".write[0]: must be a text, got a number"),
        ("read = ['a b']", ": must name tenants, or '*' for all, got 'a b'"),
        ("", ": must have a tenant that may read or write"),
        ("read = []\nwrite = []", ": must have a tenant that may read or write"),
    ],
)
def test_wrong_namespaces(tmp_path: Path, text: str, words: str) -> None:
    assert refusal(tmp_path, f"[default]\n[namespaces.shared]\n{text}") == f"namespaces.shared{words}"
    named = refusal(tmp_path, f'[default]\n[namespaces."two\\nlines"]\n{text}')
    assert named == f"namespaces.'two\\nlines'{words}"


def test_a_tenant_twice_is_no_toml(tmp_path: Path) -> None:
    for text in ("[tenants.a]\n[tenants.a]", "[tenants]\na = {}\na = {}", "[default]\nweight = 1\nweight = 2"):
        assert refusal(tmp_path, text).startswith("must be TOML: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[tenants.\xff]", "must be UTF-8, byte 9 is not"),
        ("[tenants.a", "must be TOML: "),
        ("a = " + "[" * 3000, "must be TOML with fewer nested levels"),
        ("[default]\nweight = " + "9" * 5000, "must be TOML: Exceeds the limit"),
        ("[default]\nweight = 0x" + "f" * 9000, "default.weight: must be from 0.001 to 1000, got a number that is too"),
        ("[default]\nmax_running = [0x" + "f" * 9000 + "]", "default.max_running: must be a whole number from 1 to"),
        ("#" * (MAX_FILE_BYTES + 1), f"must have at most {MAX_FILE_BYTES} bytes"),
    ],
)
def test_texts_that_are_no_toml(tmp_path: Path, text: Any, words: str) -> None:
    assert refusal(tmp_path, text).startswith(words)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    with pytest.raises(TomlFileError) as caught:
        read_tenants(path)
    assert str(caught.value) == f"--tenants {path}: cannot be read: No such file or directory"
    # Nobody writes into it: opened like a file it would hold up the process.
    os.mkfifo(path)
    for wrong in (path, tmp_path):
        with pytest.raises(TomlFileError) as caught:
            read_tenants(wrong)
        assert str(caught.value) == f"--tenants {wrong}: must be a regular file"


def test_the_example_of_the_documentation_is_taken(tmp_path: Path) -> None:
    """It shows every limit there is."""
    _, example = fenced(ROOT / "docs" / "deployment.md", "toml")
    (tmp_path / "tenants.toml").write_text(example)
    found = read_tenants(tmp_path / "tenants.toml")
    assert found.default == TenantLimits(max_waiting=100)
    alice = found.tenants["alice"]
    changed = [field.name for field in fields(TenantLimits) if getattr(alice, field.name) != field.default]
    assert changed == [field.name for field in fields(TenantLimits)]
    assert found.namespaces == {"manuals": SharedNamespace(frozenset({"*"}), frozenset({"alice"}))}
