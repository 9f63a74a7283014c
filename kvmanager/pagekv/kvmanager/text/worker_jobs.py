"""The code of a worker process: reads jobs from standard input, one after the other, and answers each.

`WorkerProcess` starts it, and only the two know this format: a job has a name, the CPU seconds that it may take, and a
body; an answer has a status and a body. The process ends when its input ends or, on Linux, when its parent ends. Its
own timer kills it when a job takes too long, even in the middle of a library call.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from pagekv.kvmanager.text.library_errors import words_of

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
JOB = struct.Struct("<16sdQ")
ANSWER = struct.Struct("<BQ")
DONE, REFUSED = 0, 1
# Most bytes that a template may render.
MAX_RENDERED_BYTES = 16 * 2**20

Job = Callable[[bytes], bytes]


class NoAnswer(Exception):
    """A job cannot be done; the message says why."""


def template_jobs(setup: bytes) -> dict[str, Job]:
    """Jobs of a chat template. `setup`: JSON with `source` and `special_tokens`. Raises NoAnswer."""
    import msgpack

    from pagekv.kvmanager.text.template_sandbox import ChatTemplateError, TemplateSandbox

    given = json.loads(setup)
    try:
        template = TemplateSandbox(given["source"], given["special_tokens"])
    except ChatTemplateError as error:
        raise NoAnswer(str(error)) from error

    def render(body: bytes) -> bytes:
        try:
            rendered = template.render(msgpack.unpackb(body)).encode()
        except ChatTemplateError as error:
            raise NoAnswer(str(error)) from error
        except UnicodeEncodeError as error:
            raise NoAnswer(f"the model's chat template fails on it: {error}") from error
        if len(rendered) > MAX_RENDERED_BYTES:
            raise NoAnswer(
                f"the model's chat template makes {len(rendered)} bytes of it, must be at most {MAX_RENDERED_BYTES}"
            )
        return rendered

    return {"render": render}


def tokenizer_jobs(setup: bytes) -> dict[str, Job]:
    """Jobs of a tokenizer. `setup`: the path of tokenizer.json, or its content."""
    import tokenizers

    if setup.startswith(b"{"):
        tokenizer = tokenizers.Tokenizer.from_str(setup.decode())
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(os.fsdecode(setup))))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(body: bytes) -> bytes:
        """Number of tokens, and their ids unless there are more than the limit."""
        special_tokens, limit = struct.unpack_from("<?Q", body)
        text = body[struct.calcsize("<?Q") :].decode()
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0]
        ids = array("I", encoding.ids).tobytes() if len(encoding) <= limit else b""
        return struct.pack("<Q", len(encoding)) + ids

    def decode(body: bytes) -> bytes:
        return tokenizer.decode(array("I", body), skip_special_tokens=True).encode()

    return {"encode": encode, "decode": decode}


_KINDS: dict[str, Callable[[bytes], dict[str, Job]]] = {"template": template_jobs, "tokenizer": tokenizer_jobs}


def serve(kind: str, jobs_in: BinaryIO, answers: BinaryIO) -> None:
    """Does jobs until the input ends. The first job, `setup`, makes the other jobs of this kind; `nothing` does
    nothing. A job whose body is cut off gets no answer, because its writer was killed. An error of a job is its answer.
    So are NoAnswer and MemoryError of the setup. Its other errors end the process: the next one may do better.
    """
    jobs: dict[str, Job] = {"nothing": lambda _: b""}
    while len(head := jobs_in.read(JOB.size)) == JOB.size:
        name, cpu_s, size = JOB.unpack(head)
        body = jobs_in.read(size)
        if len(body) < size:
            return
        job = name.rstrip(b"\0").decode()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            if job == "setup":
                jobs |= _KINDS[kind](body)
                status, answer = DONE, b""
            else:
                status, answer = DONE, jobs[job](body)
        except NoAnswer as error:
            status, answer = REFUSED, str(error).encode("utf-8", "replace")
        except MemoryError:
            status, answer = REFUSED, b"it needs more memory than it may have"
        except BaseException as error:
            if job == "setup":
                raise
            status, answer = REFUSED, words_of(error).encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        del body
        answers.write(ANSWER.pack(status, len(answer)))
        answers.write(answer)
        answers.flush()


def bound_memory(memory_bytes: int) -> None:
    """Bounds this process's address space by `memory_bytes`, or keeps a lower hard limit, which only root may raise."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(kind: str, memory_bytes: int) -> None:
    """Serves on standard input and output until the input ends, within `memory_bytes` of address space."""
    # Ctrl-C reaches every process of a terminal, but this one ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    bound_memory(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    # A library may print to standard output: its text goes to standard error, not among the answers.
    os.dup2(2, 1)
    try:
        serve(kind, sys.stdin.buffer, answers)
    except BrokenPipeError:
        # The parent ended before the answer. Flushing the rest at the interpreter's own end would fail again.
        os._exit(1)
