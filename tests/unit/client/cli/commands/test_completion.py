"""`pagekv completion`: the script, asked by a shell. Needs shtab (pagekv[completion], part of pagekv[dev])."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagekv.client.cli.main import GROUPS, main

COMMANDS = [name for names in GROUPS.values() for name in names]
# Asks as bash does on Tab, for the words given, of which the last one is being typed.
ASK = """
set -e
source /dev/stdin
function=$(complete -p pagekv | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
"$function" pagekv "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("pagekv ", [*COMMANDS, "serve"]),
        ("pagekv ge", ["generate"]),
        ("pagekv generate --max", ["--max-tokens"]),
        ("pagekv serve --executor-p", ["--executor-port"]),
        ("pagekv blocks --state ", ["free", "cached", "active", "pinned"]),
        ("pagekv completion ", ["bash", "zsh"]),
    ],
)
def test_bash_completes(typed: str, found: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bash", "--norc", "-c", ASK, "bash", *typed.split(" ")]
    done = subprocess.run(asked, input=script_for("bash", capsys), capture_output=True, text=True, timeout=240)
    assert (sorted(done.stdout.split()), done.stderr) == (sorted(found), "")


def test_zsh_knows_every_command_and_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.strip() for line in script_for("zsh", capsys).splitlines()]
    assert lines[0] == "#compdef pagekv"
    assert "generate:'Generate text from a prompt.'" in lines
    assert {*COMMANDS} <= {line.partition(":")[0] for line in lines}


def test_the_help_keeps_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Completion needs a help text of each command, which argparse would list a second time."""
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.count("enerate text from a prompt") == 1


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "fish"])
    assert end.value.code == 2
    assert "invalid choice: 'fish' (choose from" in capsys.readouterr().err


def test_without_shtab_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'pagekv[completion]'" in capsys.readouterr().err
