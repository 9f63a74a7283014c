"""Streamed text equals the text of all tokens at once, and never splits a character."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.engine import small_tokenizers

from pagekv.kvmanager.text.detokenizer import Detokenizer
from pagekv.kvmanager.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(small_tokenizers.byte_level())
SENTENCEPIECE = Tokenizer(small_tokenizers.sentencepiece())
METASPACE = Tokenizer(small_tokenizers.metaspace())
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from(" abdehnt.I\n✓€日😀👩\u200d🏽é\ufffd"), st.characters(codec="utf-8"))
)


def encode(tokenizer: Tokenizer, text: str, special_tokens: bool = False) -> list[int]:
    return tokenizer.encode(text, special_tokens=special_tokens, limit=10**6)


def stream(tokenizer: Tokenizer, ids: list[int], context: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [detokenizer.add(token_id) for token_id in ids] + [detokenizer.flush()]


@given(TEXTS)
def test_byte_level_chunks_join_to_the_text(text: str) -> None:
    chunks = stream(BYTE_LEVEL, encode(BYTE_LEVEL, text), [])
    assert "".join(chunks) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in chunk for chunk in chunks)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40))
def test_byte_level_any_ids_join_to_the_full_decode(ids: list[int]) -> None:
    """Also invalid UTF-8, special tokens, added tokens and ids beyond the tokenizer."""
    assert "".join(stream(BYTE_LEVEL, ids, [])) == BYTE_LEVEL.decode(ids)


@given(TEXTS, TEXTS)
@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE], ids=["bytes", "sentencepiece", "metaspace"]
)
def test_output_continues_the_prompt(tokenizer: Tokenizer, prompt: str, output: str) -> None:
    ids = encode(tokenizer, output)
    context = encode(tokenizer, prompt, special_tokens=True)
    chunks = stream(tokenizer, ids, context)
    assert tokenizer.decode(context) + "".join(chunks) == tokenizer.decode(context + ids)


@given(TEXTS)
def test_sentencepiece_chunks_join_to_the_full_decode(text: str) -> None:
    ids = encode(SENTENCEPIECE, text)
    assert "".join(stream(SENTENCEPIECE, ids, [])) == SENTENCEPIECE.decode(ids) == text


def test_an_unfinished_character_is_held_back_until_it_is_whole() -> None:
    ids = [3 + byte for byte in "é😀".encode()]
    assert stream(SENTENCEPIECE, ids, [0]) == ["", "é", "", "", "", "😀", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_flush_shows_an_unfinished_character_once(cut: int) -> None:
    ids = [3 + byte for byte in "😀".encode()[:cut]]
    assert "".join(stream(SENTENCEPIECE, ids, [0])) == "\ufffd"
    whole = encode(SENTENCEPIECE, "a")
    assert "".join(stream(SENTENCEPIECE, [*ids, *whole], [0, 261])) == "\ufffd a"


def test_special_tokens_have_no_text_and_keep_the_space_that_follows() -> None:
    context = encode(SENTENCEPIECE, "the", special_tokens=True)
    the = encode(SENTENCEPIECE, "the")
    assert stream(SENTENCEPIECE, [1, *the], context)[0] == ""
    assert "".join(stream(SENTENCEPIECE, [1, *the], context)) == " the"
    assert "".join(stream(SENTENCEPIECE, the, [0])) == "the"


def test_a_token_whose_text_is_remembered_keeps_the_space_that_follows() -> None:
    ids = [3 + ord("\n"), *encode(SENTENCEPIECE, "the")]
    assert ["".join(stream(SENTENCEPIECE, ids, [0])) for _ in range(2)] == ["\n the"] * 2


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, METASPACE], ids=["sentencepiece", "metaspace"])
def test_ids_that_the_tokenizer_does_not_know_have_no_text_and_keep_the_space_that_follows(
    tokenizer: Tokenizer,
) -> None:
    """A model may have more ids than its tokenizer; a matrix is padded to a round size."""
    the, unknown = encode(tokenizer, "the"), 5000
    for _ in range(2):
        assert "".join(stream(tokenizer, [*the, unknown, *the], [])) == tokenizer.decode([*the, unknown, *the])
        assert "".join(stream(tokenizer, [unknown, *the], [])) == "the"
        assert "".join(stream(tokenizer, the, [*the, unknown])) == " the"


@given(TEXTS, st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 5000])), max_size=5))
@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE], ids=["bytes", "sentencepiece", "metaspace"]
)
def test_ids_without_text_change_no_text_anywhere(
    tokenizer: Tokenizer, text: str, inserted: list[tuple[int, int]]
) -> None:
    ids = encode(tokenizer, text)
    for position, token_id in inserted:
        ids.insert(position, token_id)
    assert "".join(stream(tokenizer, ids, [])) == tokenizer.decode(ids)


def test_added_tokens_outside_the_byte_alphabet() -> None:
    ids = encode(BYTE_LEVEL, "so two words ✓!")
    assert len(ids) < 8
    assert "".join(stream(BYTE_LEVEL, ids, [])) == "so two words ✓!"


def test_a_decoder_that_joins_with_spaces() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"alpha": 0, "beta": 1, "?": 2}, unk_token="?"))
    tokenizer = Tokenizer(backend)
    assert stream(tokenizer, [0, 1, 1], [1]) == [" alpha", " beta", " beta", ""]


def test_the_demo_model_streams_its_own_text() -> None:
    directory = Path(__file__).parents[4] / "client/pagekv/client/demo_model"
    tokenizer = Tokenizer.load(directory)
    text = "In the beginning was the Word — 始めに言葉ありき 😀."
    assert "".join(stream(tokenizer, encode(tokenizer, text), [])) == text
