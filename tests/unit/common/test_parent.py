"""The end of a parent, which is the end of a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.clients.stack import environment

from pagekv.common.parent import ENDS_WITH_PARENT

PROGRAM = """
import asyncio
from pagekv.common.parent import parent_is_gone
from pagekv.common.server import stop_event

async def main():
    stop = stop_event()
    assert not parent_is_gone()
    print("waiting", flush=True)
    await stop.wait()
    # Its end, which can be read for ever, is read once.
    assert not asyncio.get_running_loop().remove_reader(0)
    print("stopped", parent_is_gone(), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("asked", [True, False])
def test_the_end_of_standard_input_stops_a_process_that_was_asked(asked: bool) -> None:
    env = environment() | ({ENDS_WITH_PARENT: "1"} if asked else {})
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        # Bytes on it mean nothing.
        process.stdin.write("x")
        process.stdin.flush()
        if not asked:
            assert ENDS_WITH_PARENT not in os.environ
            process.terminate()
        else:
            process.stdin.close()
        assert process.stdout.readline() == f"stopped {asked}\n"
        assert process.wait(60) == 0
