"""A streamed answer: its text, its times, and a summary line."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagekv.client.cli.terminal import counted, milliseconds
from pagekv.client.client import PageKVClient
from pagekv.client.generation_types import Chunk, Completion, GenerateOptions, Prompt

# Least seconds between the first and the last message of which a rate is told: messages wait for each other for some
# milliseconds.
MEASURED_S = 0.05


class Stopwatch:
    """Measures the times of one stream. The clock starts when the object is made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._first_tokens = 0
        self._last = self._start

    def see(self, chunk: Chunk) -> None:
        """Notes the arrival of a chunk. A chunk without tokens, such as the last one, is ignored."""
        if not chunk.token_ids:
            return
        self._last = time.perf_counter()
        if self._first is None:
            self._first, self._first_tokens = self._last, chunk.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None if none came."""
        return None if self._first is None else self._first - self._start

    def tokens_per_s(self, completion_tokens: int) -> float | None:
        """Tokens per second after the first chunk; None if there were none, or if all came at once: a short answer, or
        one that something on the way has held back.
        """
        if self._first is None or self._last - self._first < MEASURED_S or completion_tokens <= self._first_tokens:
            return None
        return (completion_tokens - self._first_tokens) / (self._last - self._first)


def stream_to(
    write: Callable[[str], None], client: PageKVClient, prompt: Prompt, options: GenerateOptions
) -> tuple[Completion, Stopwatch]:
    """Generates one continuation; `write` gets the text as it arrives."""
    watch = Stopwatch()
    with client.stream(prompt, **options) as stream:
        for chunk in stream:
            watch.see(chunk)
            write(chunk.text)
    return stream.completion, watch


def summary(completion: Completion, watch: Stopwatch) -> str:
    """One line: tokens, cached tokens, time to first token, rate, preemptions and resumptions."""
    rate = watch.tokens_per_s(completion.completion_tokens)
    parts = [
        f"{counted(completion.prompt_tokens, 'prompt token')} ({completion.cached_tokens} cached)",
        f"{completion.completion_tokens} generated",
        f"TTFT {milliseconds(watch.ttft_s)}",
    ]
    if rate is not None:
        parts.append(f"{rate:.0f} tok/s")
    if completion.preemptions:
        parts.append(f"preempted {times(completion.preemptions)}")
    if completion.resumes:
        parts.append(f"resumed {times(completion.resumes)}")
    return f"[{' · '.join(parts)} · {completion.finish_reason}]"


def times(number: int) -> str:
    """How often, in words: once, or 3 times."""
    return "once" if number == 1 else f"{number} times"
