"""The demo model in the wheel: small enough, loadable, and recognisably English."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

DEMO_MODEL = Path(__file__).parents[2] / "client" / "pagekv" / "client" / "demo_model"
LIMIT_BYTES = 12_000_000

# Function words and other very common words of any English text: a list that was not drawn from
# the training data, so that a model which babbles in word-like syllables fails.
COMMON_WORDS = """
a about above after again against all also although always am among an and another any are
around as ask asked at away back be because become been before began behind being between
body book both bread bring brought but by call called came can cannot cause child children
city come could cry day days dead death did die do does done door down each earth eat end
enough even ever every evil eye eyes face fall far father fear few fire first five for forth
found four from full gave get give given go god gold good got great had hand hands has have
he head hear heard heart heaven help her here high him himself his holy home house how
hundred i if in into is it its itself keep kept kill killed king know known land last law lay
leave left let life light like little live lived long look lord love made make man many may
me mean men might money more morning most mother mountain mouth much must my name near never
new next night no none nor not nothing now of off old on once one only open or other our out
over own part pass peace people place priest put read right rise river run said saith same
saw say saying says sea see seen sent servant servants serve set seven shall she should show
sin since sit six small so some son sons soul speak spirit spoke stand still stone such
sword take taken tell ten than that the thee their them themselves then there therefore these
they thing things think third this those thou though thousand three through thus thy time to
today together told too took toward tree truth turn turned two under until unto up upon us
use used very voice walk wall was water way we well went were what when where which while who
whole whom whose why wife will wine with within without woman women word words work world
would write written year years yes yet you young your
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return loaded.eval()


def _greedy(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def test_artefact_is_complete_and_small() -> None:
    names = {file.name for file in DEMO_MODEL.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) < LIMIT_BYTES


def test_config_agrees_with_tokenizer(tokenizer: Any) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    generation = json.loads((DEMO_MODEL / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    for read in (config, generation):
        assert read["eos_token_id"] == tokenizer.eos_token_id
        assert read["bos_token_id"] == tokenizer.bos_token_id
    # Grouped-query attention is what makes the model a fair test of a paged cache.
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] == tokenizer.model_max_length == 2048


def test_model_loads_in_the_shape_of_its_config(model: Any) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert model.get_input_embeddings().weight.shape == (
        config["vocab_size"],
        config["hidden_size"],
    )
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    "text",
    [
        "In the beginning God created the heaven and the earth.",
        "  two blanks,\n\na\ttab and a trailing blank ",
        "naïve café — \u201cquoted\u201d \u2018text\u2019 …",
        "日本語、Ελληνικά, русский, עברית",
        "emoji 🙂👩‍👩‍👧 and e\u0301 combining",
        "",
    ],
)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_chat_template_renders(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|endoftext|><|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\nHi.<|endoftext|>"
        "<|user|>\nWho are you?\n<|assistant|>\n"
    )
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    for marker, count in (("<|user|>", 2), ("<|assistant|>", 2), ("<|endoftext|>", 2)):
        assert ids.count(tokenizer.convert_tokens_to_ids(marker)) == count


@pytest.mark.parametrize("prompt", ["In the beginning", "And the king said unto them,", "He went to the city, and"])
def test_greedy_text_is_english(model: Any, tokenizer: Any, prompt: str) -> None:
    words = re.findall(r"[a-z]+", _greedy(model, tokenizer, prompt, 60).lower())
    assert len(words) >= 20
    common = set(COMMON_WORDS.split())
    share = sum(word in common for word in words) / len(words)
    assert share > 0.6, " ".join(words)
    # Greedy decoding of so small a model ends in a refrain; a single word over and over is a fault.
    assert len(set(words)) >= 6, " ".join(words)


def test_loss_is_that_of_a_trained_model(model: Any, tokenizer: Any) -> None:
    # A sentence written for this test. An untrained model is at log(4096) = 8.3.
    text = (
        "The old man went down to the river with his two sons, and they brought water to the "
        "house before the evening, because the people of the city were in great fear."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 4.5


def test_far_positions_are_as_good_as_near_ones(model: Any, tokenizer: Any) -> None:
    # Repeated text gets easier with distance if rotary positions work, and hopeless if they do not.
    text = "And the people came to the king, and he spoke to them, and said what was to be done. "
    ids = tokenizer(text * 200, return_tensors="pt")["input_ids"][:, :2048]
    assert ids.shape[1] == 2048
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert losses[1792:].mean() < losses[:64].mean()
