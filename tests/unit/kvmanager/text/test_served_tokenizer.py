"""Which tokenizer a model is served with, and when one ends. `tests/unit/kvmanager/test_server_tokenizer.py` has it
in a running manager.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.engine import small_tokenizers
from support.event_loop import in_event_loop

from pagekv.common.errors import Unavailable
from pagekv.common.models import ModelNotFound
from pagekv.kvmanager.text.served_tokenizer import ServedTokenizer, load_tokenizer
from pagekv.kvmanager.text.tokenizer import Tokenizer


@in_event_loop
async def test_the_model_decides_where_none_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    small_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    served = ServedTokenizer(None, from_executor=True)
    found = await served.of_model(str(tmp_path))
    assert found is not None
    assert found.directory == tmp_path
    assert await served.of_model("") is None
    assert "the executor has no model directory" in caplog.text
    assert await served.of_model(str(tmp_path / "nothing")) is None
    assert "no tokenizer: serving token ids only" in caplog.text


@in_event_loop
@pytest.mark.parametrize("named", [None, Tokenizer(small_tokenizers.byte_level())])
async def test_one_that_is_named_serves_every_model(tmp_path: Path, named: Tokenizer | None) -> None:
    served = ServedTokenizer(named, from_executor=False)
    assert await served.of_model(str(tmp_path)) is await served.of_model("") is named


@in_event_loop
async def test_the_one_before_ends_with_its_successor_and_the_last_one_in_the_end() -> None:
    served = ServedTokenizer(None, from_executor=True)
    first, second = (Tokenizer(small_tokenizers.byte_level()) for _ in range(2))
    served.keep(first)
    served.keep(first)
    assert await first.encode_long("a", special_tokens=False, limit=100)
    served.keep(second)
    with pytest.raises(Unavailable):
        await first.encode_long("a", special_tokens=False, limit=100)
    assert await second.encode_long("a", special_tokens=False, limit=100)
    served.close()
    served.close()
    assert served.kept is None
    with pytest.raises(Unavailable):
        await second.encode_long("a", special_tokens=False, limit=100)


def test_a_name_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_tokenizer(str(tmp_path / "nothing"))
