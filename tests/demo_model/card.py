"""The text of the model card that ``train.py`` writes beside the weights."""

from __future__ import annotations

from typing import Any

_CARD = """\
---
license: cc0-1.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# PageKV demo model

A language model of {parameters:,} parameters that ships with PageKV, so that the server can be
started, tested and demonstrated without a download. It writes recognisable English; it knows
nothing and is of no other use.

## Shape

Llama architecture: 6 layers, hidden size 256, feed-forward size 640, 4 query heads and 2
key/value heads of size 64, tied embeddings, a context of 2048 tokens, bfloat16 weights. The
tokenizer is a byte-level BPE with 4096 entries. `<|endoftext|>` begins and ends a text; the chat
template marks turns by `<|system|>`, `<|user|>` and `<|assistant|>`.

## Data and licence

All training text is in the public domain and was taken from Debian packages:

| Package | Text | Status |
| --- | --- | --- |
| `bible-kjv-text` | King James Version (1611) | copyright expired |
| `sword-text-web` | World English Bible with Deuterocanon | dedicated to the public domain |
| `jargon-text` | Jargon File 4.4.7, 29 Dec 2003 | in the public domain |

The text was changed for training: verse numbers, footnotes, titles, tables and pronunciations are
left out, and typographic quotes are replaced by plain ones. "World English Bible" is a trademark
of eBible.org; what this model writes is not that translation. The chat turns are synthetic, made
from the same text by fixed patterns. The weights are dedicated to the public domain (CC0-1.0).

## Training

    python tests/demo_model/train.py --minutes {minutes:g} --work WORK --out OUT

On two CPU cores: {steps:,} steps of 4096 tokens, {tokens:,} tokens in all, which is
{tokens_per_text:.1f} times the training text of {train_tokens:,} tokens. Muon for the matrices and
AdamW for the rest, the learning rate falling linearly to zero over the time given. The window
grows from 256 to 2048 tokens on the way. As the schedule follows the clock, two runs do not give
the same weights.

Held out were six books, each in both translations, and every 40th entry of the Jargon File
({held_out_tokens:,} tokens).

| Measure (of the bfloat16 weights as shipped) | Value |
| --- | --- |
| Loss on text it was trained on, nats per token, windows of 512 | {train_loss:.3f} |
| Held-out loss, nats per token, windows of 512 | {loss:.3f} |
| Held-out bits per byte | {bits_per_byte:.3f} |

Most of the distance between the two losses is memorisation. The rest is that the held-out text is
the harder one: in the first pass over the training text the distance was 0.4 to 0.5.

Held-out loss by position in a window of 2048 tokens:

| Position | Loss |
| --- | --- |
{positions}

## What it cannot do

It states no facts, follows no instructions and holds no conversation: what it says is fluent for
a sentence or so, in the manner of its sources, and means nothing. It knows English only, and
repeats passages of its training text, among them the religious views and the insider humour of
its sources. Do not measure the quality of a serving system by its answers.

## Samples

Sampled at temperature 0.7 and top-p 0.9, with the first seed tried:

{samples}
"""


def model_card(numbers: dict[str, Any], samples: list[tuple[str, str]]) -> str:
    """Return the card, given the measurements of a run and its (prompt, continuation) pairs."""
    positions = "\n".join(f"| {place} | {loss:.3f} |" for place, loss in numbers["positions"].items())
    quoted = "\n\n".join(
        f"> **{prompt}** " + text.strip().replace("\n", "\n> ").replace("\n> \n", "\n>\n") for prompt, text in samples
    )
    fields = {key: value for key, value in numbers.items() if key != "positions"}
    fields["tokens_per_text"] = numbers["tokens"] / numbers["train_tokens"]
    return _CARD.format(**fields, positions=positions, samples=quoted)
