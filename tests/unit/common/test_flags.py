"""Flags from dataclass fields: declared once, parsed, and made into the dataclass again."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field

import pytest

from pagekv.common.flags import (
    FlagParser,
    add_flags,
    address,
    declarations,
    flag,
    flag_group,
    flag_metadata,
    from_args,
    help_width,
    integer,
    is_true,
    listening_host,
    number,
    power_of_two,
    size_in_bytes,
    tcp_address,
    variable_of,
    zero_or_integer,
)


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = flag("how deep", default=2, type=integer(1, 9), needs="deep")
    deep: bool = flag("whether at all", default=False)
    fixed: int = 7


@dataclass(frozen=True, slots=True)
class Outer:
    pair: tuple[str, ...] = flag("two words", name="words", default="a b", type=lambda text: tuple(text.split()))
    mode: str = flag("which", default="one", choices=("one", "two"))
    size: frozenset[str] = field(
        default_factory=frozenset, metadata=flag_metadata("how large", default="s", choices=("s", "l"), make=frozenset)
    )
    inner: Inner = field(default_factory=Inner, metadata=flag_group("inside"))


def parse(*argv: str, **env: str) -> Outer:
    parser = FlagParser("prog", "A program.", env=env)
    add_flags(parser, Outer)
    return from_args(Outer, parser.parse(argv))


def test_what_is_not_given_has_its_default() -> None:
    # `size` alone has a default of its own where no flag was parsed.
    assert parse() == Outer(size=frozenset("s"))
    assert Outer() == Outer(("a", "b"), "one", frozenset(), Inner(2, False, 7))


def test_a_flag_wins_over_its_variable_and_that_over_the_default() -> None:
    found = parse("--words", "x", "--depth=3", "--deep", PAGEKV_WORDS="y", PAGEKV_MODE="two", PAGEKV_DEPTH="4")
    assert found == Outer(("x",), "two", frozenset("s"), Inner(3, True))
    assert parse("--no-deep", PAGEKV_DEEP="on").inner.deep is False
    assert variable_of("kv-events") == "PAGEKV_KV_EVENTS"


def test_declarations_name_flags_and_groups_in_order() -> None:
    assert [(each.name, each.group) for each in declarations(Outer)] == [
        ("words", ""),
        ("mode", ""),
        ("size", ""),
        ("depth", "inside"),
        ("deep", "inside"),
    ]


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--depth=10", "--deep"], {}, "prog: argument --depth: must be a whole number from 1 to 9, got '10'\nTry"),
        ([], {"PAGEKV_DEPTH": "x"}, "argument --depth (from PAGEKV_DEPTH): must be a whole number from 1 to 9"),
        ([], {"PAGEKV_MODE": "six"}, "environment variable PAGEKV_MODE: must be one of one, two, got 'six'"),
        ([], {"PAGEKV_DEEP": "maybe"}, "environment variable PAGEKV_DEEP: must be true or false, got 'maybe'"),
        (["--depth=2"], {}, "argument --depth: has no effect without --deep"),
        # The variable is well, and what is wrong came from the command line.
        (["--depth=10"], {"PAGEKV_DEPTH": "2"}, "prog: argument --depth: must be a whole number from 1 to 9, got '10'"),
        (["--depth"], {"PAGEKV_DEPTH": "2"}, "prog: argument --depth: expected one argument"),
        (["--dee"], {}, "unrecognized arguments: --dee; did you mean --deep?"),
        (["--wo", "x"], {}, "unrecognized arguments: --wo x; did you mean --words?"),
        (["--wrods=x"], {}, "unrecognized arguments: --wrods=x; did you mean --words?"),
        # Like --deep by its dashes.
        (["--beeps"], {}, "unrecognized arguments: --beeps\n"),
        (["--frobnicate=3", "x"], {}, "unrecognized arguments: --frobnicate=3 x\n"),
        # This program has flags alone, so quotes would not help.
        (["words", "too", "many"], {}, "unrecognized arguments: words too many\n"),
    ],
)
def test_what_is_wrong_ends_with_status_2_and_its_reason(
    argv: list[str], env: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv, **env)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_help_explains_variables_by_no_flag_of_its_own_and_names_needed_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "environment variable: --a-flag is PAGEKV_A_FLAG." in text
    assert "how deep; only with --deep [2]" in text
    assert "--deep, --no-deep whether at all [off]" in text


def test_a_flag_of_another_program_is_said_to_be_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser("prog", "", env={})
    parser.elsewhere = {"other": ("far", "near")}
    for given, words in (("--far=1", "--far=1; --far is a flag of other"), ("--no-near", "; --no-near is a flag of o")):
        with pytest.raises(SystemExit):
            parser.parse([given])
        assert words in capsys.readouterr().err


def test_a_refusal_may_be_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser("prog", "", env={"PAGEKV_DEPTH": "x"})
    add_flags(parser, Outer)
    parser.as_json = True
    with pytest.raises(SystemExit) as ended:
        parser.parse([])
    assert ended.value.code == 2
    message = "argument --depth (from PAGEKV_DEPTH): must be a whole number from 1 to 9, got 'x'"
    assert json.loads(capsys.readouterr().err) == {"error": {"code": "USAGE", "message": message}}


@pytest.mark.parametrize(
    ("check", "good", "value", "bad"),
    [
        (integer(1, 9), "9", 9, ["0", "10", "1.0", ""]),
        (zero_or_integer(2, 9), "0", 0, ["1", "10", "-1", "-2"]),
        (zero_or_integer(2, 9), "2", 2, ["x"]),
        (number(0, 1), "0.5", 0.5, ["-0.1", "nan", "inf", "x"]),
        (power_of_two(1, 256), "64", 64, ["0", "3", "512", "x"]),
        (size_in_bytes(0, 2**40), "1.5MiB", 3 << 19, ["-1", "1 parsec", "2TiB", "1e400"]),
        (size_in_bytes(0, 2**50), "10TiB", 10 << 40, ["1PiB", "2000TB"]),
        (address, "unix:/run/x", "unix:/run/x", ["50051", "host:", "host:65536", "unix:"]),
        (address, "[::1]:0", "[::1]:0", ["::1:50051", "http://127.0.0.1:8080", "127.0.0.1:²"]),
        (tcp_address, "", "", ["unix:/x", ":1"]),
        (listening_host, "::1", "[::1]", ["", "127.0.0.1:50051", "http://a", "a b", "[::1]:50051", "[a]", "x" * 254]),
        (listening_host, "[::1]", "[::1]", ["[]", ":50051", "a/b"]),
        (listening_host, "[127.0.0.1]", "127.0.0.1", ["[gpu1]"]),
        (listening_host, "gpu1.local", "gpu1.local", [":"]),
    ],
)
def test_types_take_what_is_within_bounds(check: object, good: str, value: object, bad: list[str]) -> None:
    assert callable(check)
    assert check(good) == value
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=r"^must be"):
            check(text)


def test_large_bounds_are_written_out() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^must be a number from 0\.001 to 1000000, got '0'$"):
        number(0.001, 1e6)("0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://127.0.0.1:8080", "; leave http:// out"),
        ("::1:50051", "; an IPv6 address stands in brackets, as in [::1]:50051"),
    ],
)
def test_an_address_of_another_form_is_answered_with_the_one_wanted(text: str, words: str) -> None:
    for check in (address, tcp_address):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^must be host:port .*{re.escape(words)}"):
            check(text)


@pytest.mark.parametrize(
    ("check", "text", "named"),
    [
        (address, "8080", "unix:/path"),
        (address, "unix:", "unix:/path"),
        (tcp_address, "8080", "empty"),
        (tcp_address, "a:65536", "empty"),
        (tcp_address, "unix:/x", "empty"),
        (tcp_address, "unix:8080", "empty"),
        (tcp_address, "http://127.0.0.1:8080", "empty"),
    ],
)
def test_a_refused_address_is_answered_with_what_else_the_flag_takes(check: object, text: str, named: str) -> None:
    assert callable(check)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        check(text)
    assert f"a port from 0 to 65535, or {named}, got {text!r}" in str(refused.value)


def test_true_is_written_in_four_ways() -> None:
    assert [text for text in ("1", "TRUE", "yes", "on", "0", "off", "") if is_true(text)] == ["1", "TRUE", "yes", "on"]


@pytest.mark.parametrize(("columns", "wanted"), [("1", 40), ("60", 58), ("500", 100)])
def test_help_has_a_width_in_any_terminal(monkeypatch: pytest.MonkeyPatch, columns: str, wanted: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert help_width() == wanted
