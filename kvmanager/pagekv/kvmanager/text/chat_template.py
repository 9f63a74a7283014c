"""A model's own chat template: turns a conversation into prompt text, as Hugging Face renders templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgpack

from pagekv.kvmanager.text.template_sandbox import ChatTemplateError, check_syntax
from pagekv.kvmanager.text.worker_process import JobRefused, WorkerProcess, WorkerStopped

# Seconds of CPU time for rendering a conversation, and bytes of address space for that and for compiling. Compiling is
# in the setup of the process, which has more time.
RENDER_CPU_S = 2.0
RENDER_MEMORY_BYTES = 512 * 2**20


class ChatTemplate:
    """A template that is compiled and rendered in a process of its own, because templates come with models and are not
    trusted. The process starts with the first conversation, or with `warm`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the variables a template may use: bos_token, eos_token and so on. Raises
        ChatTemplateError for a source that is no template.
        """
        check_syntax(source)
        setup = json.dumps({"source": source, "special_tokens": dict(special_tokens)}).encode()
        self._worker = WorkerProcess("template", lambda: setup, RENDER_CPU_S, RENDER_MEMORY_BYTES)

    async def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, messages of {"role", "content"}, up to the point where the assistant speaks.
        Raises ChatTemplateError, Overloaded, and Unavailable when closed. Cancelling the call ends the rendering.
        """
        return (await self._run("render", msgpack.packb(messages))).decode()

    async def warm(self) -> None:
        """Starts the process and compiles the template. Raises ChatTemplateError."""
        await self._run("nothing", b"")

    async def _run(self, job: str, body: bytes) -> bytes:
        try:
            return await self._worker.run(job, body)
        except JobRefused as error:
            raise ChatTemplateError(str(error)) from error
        except WorkerStopped as error:
            raise ChatTemplateError(f"the model's chat template fails on it: {error}") from error

    def close(self) -> None:
        """Ends the process for good."""
        self._worker.close()
