"""Command line flags that can also be set by environment variables: `--max-queue 8` or `PAGEKV_MAX_QUEUE=8`. The flag
wins if both are given.

A process declares its flags once, as fields of the dataclass that holds their values:

    @dataclass(frozen=True, slots=True)
    class EngineConfig:
        max_queue: int = flag("most sequences that may wait", default=1024, type=integer(1, 10**6))

`add_flags` adds the flags to a parser, `from_args` makes the dataclass from the parsed values, and docs/flags.md is
generated from `declarations`.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from pagekv.common.error_line import USAGE, error_line
from pagekv.common.loopback import ip_address
from pagekv.common.version import pagekv_version

ENV_PREFIX = "PAGEKV_"
# Least similarity, up to 1, at which the refusal of an unknown flag asks whether a known one was meant. --block-size
# and --vocab-size have a similarity of 0.7.
_ALIKE = 0.75


T = TypeVar("T")
N = TypeVar("N", int, float)


class FlagParser(argparse.ArgumentParser):
    """argparse with environment variables as defaults and refusals that name the flag, its variable and bounds."""

    def __init__(self, prog: str, description: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=help_width()),
            allow_abbrev=False,
            epilog=f"Every flag can be set as an environment variable: --a-flag is {ENV_PREFIX}A_FLAG. "
            "A flag on the command line wins.",
        )
        # For flags whose type is a plain int or float: values are refused in the same words as by types with bounds.
        self.register("type", int, _bounded(int, -math.inf, math.inf, "a whole number"))
        self.register("type", float, _any_number)
        # Whether errors are written as one line of JSON.
        self.as_json = False
        # Makes the line of an error that is to be a line of the process's log.
        self.error_line: Callable[[str], str] | None = None
        self._env = os.environ if env is None else env
        # By flag whose value came from its environment variable: the name of the variable.
        self._from_env: dict[str, str] = {}
        # By program: the names of its flags. The refusal of an unknown flag names the program that has it.
        self.elsewhere: Mapping[str, Collection[str]] = {}
        # By flag that has an effect only if another flag is set: the name of that flag.
        self._needs: dict[str, str] = {}

    def flag(
        self,
        name: str,
        help: str,
        *,
        default: Any,
        type: Callable[[str], Any] = str,
        needs: str | None = None,
        group: argparse._ArgumentGroup | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds `--name`, to `group` if there is one; with a default of True or False also `--no-name`. The help text
        ends with the default unless that is None or empty. `needs` is the name of another flag, which the help text
        names, too: if that is not set, this flag is refused on the command line.
        """
        if needs is not None:
            self._needs[name] = needs
            help += f"; only with --{needs}"
        variable = variable_of(name)
        text = self._env.get(variable)
        if isinstance(default, bool):
            if text is not None and text.lower() not in _TRUE + _FALSE:
                self.error(f"environment variable {variable}: must be true or false, got {text!r}")
            default = default if text is None else is_true(text)
            help += " [on]" if default else " [off]"
            kwargs |= {"action": argparse.BooleanOptionalAction}
        else:
            choices = kwargs.get("choices")
            if text is not None:
                # A string default goes through `type`, so the environment is checked like the command line.
                default = _FromEnv(text)
                type = self._noting_source(f"--{name}", variable, type)
                if choices is not None and text not in choices:  # which argparse checks on the command line only
                    self.error(f"environment variable {variable}: must be one of {', '.join(choices)}, got {text!r}")
            kwargs |= {"type": type}
            help = (help + ("" if default is None or default == "" else f" [{default}]")).replace("%", "%%")
        (group or self).add_argument(f"--{name}", default=default, help=help, **kwargs)

    def _noting_source(self, flag: str, variable: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
        """`convert`, which also notes in `_from_env` whether the flag's value came from the variable."""

        @wraps(convert, updated=())
        def converted(text: str) -> Any:
            self._from_env.pop(flag, None)
            if isinstance(text, _FromEnv):
                self._from_env[flag] = variable
            return convert(str(text))

        return converted

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses and exits with status 2 and one line on a bad value."""
        args = self.parse_args(argv)
        if self._needs:
            self._refuse_idle_flags(args, argv)
        return args

    def _refuse_idle_flags(self, args: argparse.Namespace, argv: Sequence[str] | None) -> None:
        """Refuses a flag on the command line whose needed flag is not set. A switch that is turned off is no mistake.
        Variables are not checked, because one may be set for many commands, of which some have no use for it.
        """
        # A flag that is not on the command line keeps this value.
        before = argparse.Namespace(**{action.dest: _NOT_GIVEN for action in self._actions})
        given = vars(self.parse_args(argv, before))
        for name, other in self._needs.items():
            value = given[_dest(name)]
            if value is not _NOT_GIVEN and value is not False and not getattr(args, _dest(other)):
                self.error(f"argument --{name}: has no effect without --{other}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown arguments itself. argparse would leave those of a subcommand to the parser above it, which
        knows neither the flags with similar names nor where their help is.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = self._nearest(unknown[0].partition("=")[0]) if unknown[0].startswith("-") else self._quotes()
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _quotes(self) -> str:
        """The end of a refusal of further words: a hint if the command has arguments without a flag, else ""."""
        return "; an argument with blanks needs quotes" if self._get_positional_actions() else ""

    def _nearest(self, name: str) -> str:
        """The end of a refusal: the program that has the flag, or a question that names a similar flag, or ""."""
        for program, names in self.elsewhere.items():
            if name.removeprefix("--").removeprefix("no-") in names:
                return f"; {name} is a flag of {program}"
        flags = [each for action in self._actions for each in action.option_strings if each.startswith("--")]
        begun = [each for each in flags if name.startswith("--") and each.startswith(name)]
        # Without the dashes, which would make any two flags more similar.
        alike = difflib.get_close_matches(name.lstrip("-"), [each.lstrip("-") for each in flags], n=1, cutoff=_ALIKE)
        near = begun or [f"--{each}" for each in alike]
        return f"; did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        """Ends with status 2, and one line on standard error that says why."""
        for flag, variable in self._from_env.items():
            if f"argument {flag}:" in message:
                message = message.replace(f"argument {flag}:", f"argument {flag} (from {variable}):")
        if self.error_line is not None:
            shown = self.error_line(message)
        else:
            shown = error_line(USAGE, message) if self.as_json else f"{self.prog}: {message}\nTry '{self.prog} --help'."
        self.exit(2, f"{shown}\n")


def help_width() -> int:
    """Columns of a help text: 100, or fewer if the terminal or the variable COLUMNS has fewer; never below 40."""
    return max(40, min(100, shutil.get_terminal_size((102, 24)).columns - 2))


_FLAG = "flag"
_GROUP = "group"


@dataclass(frozen=True, slots=True)
class Declaration:
    """A flag as a configuration dataclass declares it; arguments as of `FlagParser.flag`."""

    name: str
    group: str
    help: str
    default: Any
    # Turns the parsed value into the field's value; None: the field has the parsed value.
    make: Callable[[Any], Any] | None
    arguments: Mapping[str, Any]


def flag(help: str, *, default: Any, **arguments: Any) -> Any:
    """A field of a configuration dataclass that is set by the flag of its name; arguments as of `flag_metadata`. The
    field has the flag's default; `type` converts a default that is a string.
    """
    made = arguments.get("type", str)(default) if isinstance(default, str) else default
    return field(default=made, metadata=flag_metadata(help, default=default, **arguments))


def flag_metadata(
    help: str, *, default: Any, name: str = "", make: Callable[[Any], Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Metadata of a field that is set by a flag. `name`: the flag's name, if it is not the field's. `make` turns the
    parsed value into the field's value. Other arguments are those of `FlagParser.flag`.
    """
    return {_FLAG: Declaration(name, "", help, default, make, arguments)}


def flag_group(title: str) -> dict[str, str]:
    """Metadata of a field whose `default_factory` is a configuration dataclass, with its flags as a group."""
    return {_GROUP: title}


def declarations(config: type[Any], group: str = "") -> Iterator[Declaration]:
    """Every flag of a configuration dataclass and of the groups in it, in the order of the fields."""
    for each in fields(config):
        if _FLAG in each.metadata:
            declared = each.metadata[_FLAG]
            yield replace(declared, name=declared.name or each.name.replace("_", "-"), group=group)
        elif _GROUP in each.metadata:
            yield from declarations(cast("type[Any]", each.default_factory), each.metadata[_GROUP])


def add_version(parser: argparse.ArgumentParser) -> None:
    """--version, which prints the program and the version of this installation, and ends with status 0."""
    parser.add_argument("--version", action="version", version=f"{parser.prog} {pagekv_version()}")


def add_flags(parser: FlagParser, config: type[Any], group: str = "") -> None:
    """Adds every flag that `config` declares, to a group of the title `group` if there is one."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in declarations(config, group):
        if each.group and each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        parser.flag(each.name, each.help, default=each.default, group=groups.get(each.group), **each.arguments)


def from_args(config: type[T], args: argparse.Namespace, **values: Any) -> T:
    """A `config` made from the parsed values. Fields without a flag have their value in `values`, or their default."""
    for each in fields(cast("Any", config)):
        if _FLAG in each.metadata:
            declared = each.metadata[_FLAG]
            value = getattr(args, _dest(declared.name or each.name))
            values[each.name] = declared.make(value) if declared.make else value
        elif _GROUP in each.metadata:
            values[each.name] = from_args(cast("type[Any]", each.default_factory), args)
    return config(**values)


class _FromEnv(str):
    """An environment variable's value."""


_NOT_GIVEN = object()


def _dest(name: str) -> str:
    """Attribute of a flag's value."""
    return name.removeprefix("--").replace("-", "_")


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def variable_of(name: str) -> str:
    """The environment variable of the flag `--name`."""
    return ENV_PREFIX + name.upper().replace("-", "_")


def is_true(text: str) -> bool:
    """Whether a switch's environment variable turns it on."""
    return text.lower() in _TRUE


def _bounded(convert: Callable[[str], N], low: float, high: float, wanted: str) -> Callable[[str], N]:
    """A type for values from `low` to `high`, both included; a refusal says what is `wanted`."""

    def parse(text: str) -> N:
        try:
            value = convert(text)
            # NaN fails every comparison.
            if low <= value <= high:
                return value
        except (ValueError, KeyError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")

    return parse


def _any_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def integer(low: int, high: int) -> Callable[[str], int]:
    """A type for whole numbers from `low` to `high`, both included."""
    return _bounded(int, low, high, f"a whole number from {low} to {high}")


def zero_or_integer(low: int, high: int) -> Callable[[str], int]:
    """A type for 0, which stands for another value, and whole numbers from `low` to `high`, both included."""

    def convert(text: str) -> int:
        value = int(text)
        return value if value >= low or not value else -1

    return _bounded(convert, 0, high, f"0 or a whole number from {low} to {high}")


def number(low: float, high: float) -> Callable[[str], float]:
    """A type for finite numbers from `low` to `high`, both included."""
    return _bounded(float, low, high, f"a number from {low:.15g} to {high:.15g}")


def power_of_two(low: int, high: int) -> Callable[[str], int]:
    """A type for powers of two from `low` (at least 1) to `high`, both included."""

    def convert(text: str) -> int:
        value = int(text)
        return value if value.bit_count() == 1 else 0

    return _bounded(convert, low, high, f"a power of two from {low} to {high}")


def size_in_bytes(low: int, high: int) -> Callable[[str], int]:
    """A type for sizes such as 512MiB, 4GiB or plain bytes."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    units |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

    def convert(text: str) -> int:
        digits = text.strip().rstrip("bBiIkKmMgGtT ")
        return int(float(digits) * units[text.strip()[len(digits) :].strip().lower()])

    return _bounded(convert, low, high, f"a size from {low} to {high} bytes (such as 512MiB)")


def address(text: str) -> str:
    """A type for `host:port`, or `unix:/path`. Port 0 means a free port; an IPv6 address stands in brackets."""
    if text.startswith("unix:") and len(text) > 5:
        return text
    return _host_and_port(text, "unix:/path")


def _host_and_port(text: str, otherwise: str) -> str:
    """Checks `host:port`; a refusal also names what else the flag accepts."""
    host, colon, port = text.rpartition(":")
    why = ""
    if "://" in text:
        why = f"; leave {text.partition('://')[0]}:// out"
    elif ":" in host and not (host.startswith("[") and host.endswith("]")):
        why = "; an IPv6 address stands in brackets, as in [::1]:50051"
    elif colon and host not in ("", "unix") and port.isascii() and port.isdigit() and int(port) <= 65535:
        return text
    words = f"must be host:port with a port from 0 to 65535, or {otherwise}, got {text!r}{why}"
    raise argparse.ArgumentTypeError(words)


def optional_address(text: str) -> str:
    """A type for `host:port` or `unix:/path`; empty for none."""
    return address(text) if text else ""


def listening_host(text: str) -> str:
    """A type for a name or an IP address, without a port. An IPv6 address gets brackets, as before a port."""
    found = ip_address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    if found is not None:
        return f"[{found}]" if found.version == 6 else str(found)
    if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text):
        return text
    why = "; ports have flags of their own" if re.fullmatch(r"[^:]+:[0-9]*", text) else ""
    raise argparse.ArgumentTypeError(f"must be a name or an IP address, without a port, got {text!r}{why}")


def tcp_address(text: str) -> str:
    """A type for `host:port`; empty for none."""
    return "" if not text else _host_and_port(text, "empty")
