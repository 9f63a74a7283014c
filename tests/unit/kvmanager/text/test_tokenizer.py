"""Loading a model's tokenizer and chat template from its directory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.engine import small_tokenizers

from pagekv.kvmanager.text.tokenizer import Tokenizer, TokenizerError, TooManyTokens, _decoder_of

HELLO = [{"role": "user", "content": "  Hello <b> "}]


def save(directory: Path, **config: Any) -> Path:
    small_tokenizers.byte_level().save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def render(tokenizer: Tokenizer, messages: list[dict[str, str]] = HELLO) -> str:
    assert tokenizer.chat_template is not None
    return asyncio.run(tokenizer.chat_template.render(messages))


def test_encode_adds_the_special_tokens_of_a_text_only_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path))
    assert tokenizer.chat_template is None
    plain = tokenizer.encode("the earth", special_tokens=False, limit=99)
    assert tokenizer.encode("the earth", special_tokens=True, limit=99) == [0, *plain]
    assert tokenizer.decode([0, *plain, 1]) == "the earth"


def test_special_tokens_written_in_a_text_become_one_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path))
    assert tokenizer.encode("<|user|>", special_tokens=False, limit=9) == [2]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert 2 < len(Tokenizer.load(tmp_path).encode("void" * 5, special_tokens=False, limit=99)) < 64


def test_the_decoder_is_known_without_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (small_tokenizers.byte_level, small_tokenizers.sentencepiece, small_tokenizers.metaspace):
        backend = make()
        assert _decoder_of(backend) == json.loads(backend.to_str())["decoder"]
    loads = mock.Mock(side_effect=json.loads)
    monkeypatch.setattr("pagekv.kvmanager.text.tokenizer.json.loads", loads)
    backend = small_tokenizers.byte_level()
    Tokenizer(backend)
    assert 0 < sum(len(call.args[0]) for call in loads.call_args_list) < len(backend.to_str()) / 4


def test_more_tokens_than_the_limit_are_counted_and_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path))
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("\x00" * 10, special_tokens=False, limit=9)
    assert caught.value.num_tokens == 10
    assert len(tokenizer.encode("\x00" * 10, special_tokens=False, limit=10)) == 10


def test_encoding_leaves_the_interpreter_to_other_threads(tmp_path: Path) -> None:
    """A text is encoded in a thread; the event loop must go on meanwhile. Nothing else lets it, as no thread is made to
    give the interpreter up.
    """
    tokenizer = Tokenizer.load(save(tmp_path))
    text = " ".join(small_tokenizers.TEXTS) * 50
    inside = met = False

    def encode() -> None:
        nonlocal inside
        for _ in range(1000):
            inside = True
            tokenizer.encode(text, special_tokens=False, limit=10**6)
            inside = False
            if met:
                return

    thread, interval = threading.Thread(target=encode), sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()
        while thread.is_alive() and not met:
            met = inside
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert met


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no tokenizer.json: save"), ("{", "cannot be read"), ('{"model": 3}', "cannot be read")],
)
def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_broken_configuration_is_refused_by_name(tmp_path: Path, content: str) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


NESTED = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
# Python reads at most 4300 digits of a number.
DIGITS = b"9" * 5000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", "Grüße".encode("latin-1"), r"chat_template\.jinja cannot be read: .*utf-8"),
        ("chat_template.jinja", b"{{ %s }}" % DIGITS, "the chat template is broken: .*digits"),
        ("chat_template.json", NESTED, r"chat_template\.json is not JSON: .*recursion"),
        ("tokenizer_config.json", NESTED, r"tokenizer_config\.json is not JSON: .*recursion"),
        ("tokenizer_config.json", b"[%s]" % DIGITS, r"tokenizer_config\.json is not JSON: .*digits"),
        ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json cannot be read: .*utf-8"),
        ("special_tokens_map.json", NESTED, r"special_tokens_map\.json is not JSON: .*recursion"),
    ],
    ids=["latin-1", "digits", "nested template", "nested settings", "digits in settings", "no text", "nested tokens"],
)
def test_a_faulty_file_beside_the_tokenizer_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (save(tmp_path) / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(tmp_path)


def test_names_of_templates_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    several = [{"name": [], "template": "x"}, {"name": {}}, {"name": "default", "template": "default"}]
    assert render(Tokenizer.load(save(tmp_path, chat_template=several))) == "default"


def test_a_tokenizer_on_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    """A panic of Rust code is no Exception."""
    made = json.loads(small_tokenizers.byte_level().to_str())
    made["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read as a tokenizer: "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_no_fault_of_a_tokenizer(tmp_path: Path, error: type[BaseException]) -> None:
    save(tmp_path)
    with mock.patch("tokenizers.Tokenizer.from_file", side_effect=error), pytest.raises(error):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "method"),
    [("tokenizer.json", "is_file"), ("chat_template.jinja", "is_file"), ("chat_template.jinja", "read_text")],
)
def test_files_without_access_are_refused(
    tmp_path: Path, name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who has access to all."""
    (save(tmp_path) / "chat_template.jinja").write_text("x")
    real = getattr(Path, method)

    def fails(path: Path, *given: Any, **named: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *given, **named)

    monkeypatch.setattr(Path, method, fails)
    with pytest.raises(TokenizerError, match=f"{name} cannot be read: .*Permission denied"):
        Tokenizer.load(tmp_path)


def test_special_tokens_reach_the_template_in_both_spellings(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}"
    assert render(Tokenizer.load(save(tmp_path, **config, chat_template=template))) == "<s>|</s>|False"


def test_where_a_template_is_looked_for(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert render(Tokenizer.load(save(tmp_path, chat_template=several))) == "default"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert render(Tokenizer.load(tmp_path)) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert render(Tokenizer.load(tmp_path)) == "jinja"


def test_a_broken_template_is_refused_when_loading(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="broken in line 2"):
        Tokenizer.load(save(tmp_path, chat_template="fine\n{% if %}"))


@pytest.mark.parametrize("from_file", [True, False])
def test_another_process_encodes_and_decodes_likewise(tmp_path: Path, from_file: bool) -> None:
    tokenizer = Tokenizer.load(save(tmp_path)) if from_file else Tokenizer(small_tokenizers.byte_level())
    text = "the earth, Grüße 日本語 two words ✓ <|user|> " * 3000

    async def main() -> None:
        for special_tokens in (True, False):
            ids = await tokenizer.encode_long(text, special_tokens=special_tokens, limit=10**6)
            assert ids.tolist() == tokenizer.encode(text, special_tokens=special_tokens, limit=10**6)
            assert (await tokenizer.decode_long(ids)).decode() == tokenizer.decode(ids)
        with pytest.raises(TooManyTokens) as caught:
            await tokenizer.encode_long(text, special_tokens=False, limit=len(ids) - 1)
        assert caught.value.num_tokens == len(ids)

    asyncio.run(main())
    tokenizer.close()


def test_the_manager_imports_no_torch() -> None:
    code = "import sys, pagekv.kvmanager.text.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "set()"
