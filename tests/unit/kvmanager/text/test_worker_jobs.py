"""Answers of a worker process, in the format of its pipes."""

from __future__ import annotations

import io
import json
import resource
import struct
from array import array

import msgpack
import pytest
from support.engine import small_tokenizers

from pagekv.kvmanager.text.tokenizer import Tokenizer
from pagekv.kvmanager.text.worker_jobs import ANSWER, DONE, JOB, REFUSED, bound_memory, serve


def answers(kind: str, *jobs: tuple[str, bytes]) -> list[tuple[int, bytes]]:
    asked = b"".join(JOB.pack(name.encode(), 3600.0, len(body)) + body for name, body in jobs)
    written = io.BytesIO()
    serve(kind, io.BytesIO(asked), written)
    written.seek(0)
    found = []
    while head := written.read(ANSWER.size):
        status, size = ANSWER.unpack(head)
        found.append((status, written.read(size)))
    return found


@pytest.mark.parametrize("kept", [1, JOB.size - 1, JOB.size, JOB.size + 1])
def test_a_job_that_is_cut_off_is_the_end_without_a_word(kept: int) -> None:
    """As when a manager is killed while it writes one: its log is still the worker's standard error."""
    asked, written = JOB.pack(b"setup", 3600.0, 100) + bytes(100), io.BytesIO()
    serve("tokenizer", io.BytesIO(asked[:kept]), written)
    assert written.getvalue() == b""


@pytest.mark.parametrize(("hard", "most"), [(resource.RLIM_INFINITY, 1000), (5000, 1000), (700, 700)])
def test_a_lower_limit_of_memory_stays(hard: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager under `ulimit -v` hands it on: to raise it would fail, and with it every job."""
    bounds: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr("resource.setrlimit", lambda *bound: bounds.append(bound))
    bound_memory(1000)
    assert bounds == [(resource.RLIMIT_AS, (most, most))]


def test_a_conversation_is_rendered_or_refused() -> None:
    setup = json.dumps(
        {"source": "{{ x }}{{ messages[1].role }}{{ messages[0].content }}", "special_tokens": {"x": "X"}}
    )
    both = msgpack.packb([{"role": "user", "content": "é"}, {"role": "assistant", "content": ""}])
    one = msgpack.packb([{"role": "user", "content": "é"}])
    done, rendered, (status, words) = answers("template", ("setup", setup.encode()), ("render", both), ("render", one))
    assert (done, rendered, status) == ((DONE, b""), (DONE, "Xassistanté".encode()), REFUSED)
    assert b"fails on it" in words


def test_a_template_that_is_broken() -> None:
    setup = json.dumps({"source": "{% if %}", "special_tokens": {}}).encode()
    ((status, words), nothing) = answers("template", ("setup", setup), ("nothing", b""))
    assert (status, b"broken in line 1" in words, nothing) == (REFUSED, True, (DONE, b""))


@pytest.mark.parametrize("limit", [2, 99])
def test_a_text_is_encoded_up_to_the_limit_and_decoded(limit: int) -> None:
    backend = small_tokenizers.byte_level()
    tokenizer = Tokenizer(backend)
    setup, text = backend.to_str().encode(), "the earth"
    ids = tokenizer.encode(text, special_tokens=True, limit=99)
    encode, decode = struct.pack("<?Q", True, limit) + text.encode(), array("I", ids).tobytes()
    _, encoded, decoded = answers("tokenizer", ("setup", setup), ("encode", encode), ("decode", decode))
    assert encoded == (DONE, struct.pack("<Q", len(ids)) + (array("I", ids).tobytes() if limit == 99 else b""))
    assert decoded == (DONE, text.encode())


def test_a_text_that_the_library_refuses_is_answered_with_its_words() -> None:
    setup = small_tokenizers.without_unknown().to_str().encode()
    bad, good = (struct.pack("<?Q", True, 9) + text for text in (b"c", b"a"))
    _, (status, words), encoded = answers("tokenizer", ("setup", setup), ("encode", bad), ("encode", good))
    assert (status, words.startswith(b"Encountered an unknown token")) == (REFUSED, True)
    assert encoded == (DONE, struct.pack("<QI", 1, 0))


def test_a_setup_that_fails_ends_the_process() -> None:
    """The tokenizer was loaded from the same file before, so the file may come back."""
    with pytest.raises(Exception, match="No such file"):
        answers("tokenizer", ("setup", b"/nowhere/tokenizer.json"))
