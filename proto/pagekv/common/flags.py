"""Command line flags that are environment variables too: `--max-queue 8` is `PAGEKV_MAX_QUEUE=8`; the flag wins."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

ENV_PREFIX = "PAGEKV_"


class FlagParser(argparse.ArgumentParser):
    """argparse with environment variables as defaults and refusals that name the flag, its variable and bounds."""

    def __init__(self, prog: str, description: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
            allow_abbrev=False,
            epilog=f"Every flag can be set as an environment variable: --max-queue is {ENV_PREFIX}MAX_QUEUE. "
            "A flag on the command line wins.",
        )
        self._env = os.environ if env is None else env
        self._from_env: dict[str, str] = {}
        # Flags that do something only where another one is set, and that one's name.
        self._needs: dict[str, str] = {}

    def flag(
        self,
        name: str,
        help: str,
        *,
        default: Any,
        type: Callable[[str], Any] = str,
        needs: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds `--name`. A default in the help text is written by this method; `default` None means none. `needs`: it
        is refused on a command line where the flag of that name is not set.
        """
        if needs is not None:
            self._needs[name] = needs
        variable = ENV_PREFIX + name.upper().replace("-", "_")
        if variable in self._env:
            self._from_env[f"--{name}"] = variable
            # A string default goes through `type`, so the environment is checked like the command line.
            default = self._env[variable]
            choices = kwargs.get("choices")
            if choices is not None and default not in choices:  # which argparse checks on the command line only
                self.error(f"environment variable {variable}: must be one of {', '.join(choices)}, got {default!r}")
        shown = "" if default is None or default == "" else f" [{default}]"
        self.add_argument(f"--{name}", default=default, type=type, help=(help + shown).replace("%", "%%"), **kwargs)

    def switch(self, name: str, help: str, *, default: bool, needs: str | None = None) -> None:
        """Adds `--name` / `--no-name`; `needs` as with `flag`."""
        if needs is not None:
            self._needs[name] = needs
        variable = ENV_PREFIX + name.upper().replace("-", "_")
        if variable in self._env:
            text = self._env[variable].lower()
            if text not in _TRUE and text not in _FALSE:
                self.error(f"environment variable {variable}: must be true or false, got {self._env[variable]!r}")
            default = is_true(text)
        self.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses and exits with status 2 and one line on a bad value."""
        args = self.parse_args(argv)
        if self._needs:
            self._refuse_idle_flags(args, argv)
        return args

    def _refuse_idle_flags(self, args: argparse.Namespace, argv: Sequence[str] | None) -> None:
        """Those of the command line alone: a variable may be set for many commands, and some have no use for it."""
        # What is not on the command line keeps the value it has.
        before = argparse.Namespace(**{action.dest: _NOT_GIVEN for action in self._actions})
        given = vars(self.parse_args(argv, before))
        for name, other in self._needs.items():
            if given[_dest(name)] is not _NOT_GIVEN and not getattr(args, _dest(other)):
                self.error(f"argument --{name}: has no effect without --{other}")

    def error(self, message: str) -> NoReturn:
        for flag, variable in self._from_env.items():
            if f"argument {flag}:" in message:
                message = message.replace(f"argument {flag}:", f"argument {flag} (from {variable}):")
        self.exit(2, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


_NOT_GIVEN = object()


def _dest(name: str) -> str:
    """Attribute of a flag's value."""
    return name.removeprefix("--").replace("-", "_")


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def is_true(text: str) -> bool:
    """Whether a switch's environment variable turns it on."""
    return text.lower() in _TRUE


def integer(low: int, high: int) -> Callable[[str], int]:
    """A type for whole numbers from `low` to `high`, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """A type for finite numbers from `low` to `high`, both included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a number from {low:g} to {high:g}, got {text!r}")
        return value

    return parse


def power_of_two(low: int, high: int) -> Callable[[str], int]:
    """A type for powers of two from `low` to `high`, both included."""
    check = integer(low, high)

    def parse(text: str) -> int:
        try:
            value = check(text)
        except argparse.ArgumentTypeError:
            value = 0
        if value < 1 or value & (value - 1):
            raise argparse.ArgumentTypeError(f"must be a power of two from {low} to {high}, got {text!r}")
        return value

    return parse


def size_in_bytes(low: int, high: int) -> Callable[[str], int]:
    """A type for sizes such as 512MiB, 4GiB or plain bytes."""
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}

    def parse(text: str) -> int:
        digits = text.strip().rstrip("bBiIkKmMgG ")
        unit = text.strip()[len(digits) :].strip().lower()
        try:
            value = int(float(digits) * units[unit])
        except (ValueError, KeyError, OverflowError):
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a size from {low} to {high} bytes (such as 512MiB), got {text!r}"
            )
        return value

    return parse


def address(text: str) -> str:
    """A type for `host:port`, or `unix:/path`. Port 0 takes a free one."""
    if text.startswith("unix:") and len(text) > 5:
        return text
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"must be host:port with a port from 0 to 65535, or unix:/path, got {text!r}")
    return text


def tcp_address(text: str) -> str:
    """A type for `host:port`; empty for none."""
    if text.startswith("unix:"):
        raise argparse.ArgumentTypeError(f"must be host:port with a port from 0 to 65535, or empty, got {text!r}")
    return address(text) if text else ""
