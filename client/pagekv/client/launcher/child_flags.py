"""What a process started from here will read of its flags: the last word on its command line, else its variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagekv.common.flags import ENV_PREFIX, is_true


def flag_value(name: str, args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Of `--name`; None where it is not given."""
    flag, value = f"--{name}", env.get(_variable(name))
    for word, following in zip(args, [*args[1:], None], strict=False):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def switch_is_on(name: str, args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Of `--name`, `--no-name`; False where neither is given."""
    given = [word == f"--{name}" for word in args if word in (f"--{name}", f"--no-{name}")]
    return given[-1] if given else is_true(env.get(_variable(name), ""))


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper().replace("-", "_")
