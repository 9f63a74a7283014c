"""Tokenizers small enough to build in a test: byte-level BPE, and sentencepiece style with byte fallback."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; and darkness was upon the face of the deep.",
    "Grüße aus Köln, 日本語のテキスト, emoji 😀😀 and 👩‍👩‍👧.",
]
BOS, EOS, USER = "<s>", "</s>", "<|user|>"


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with ids: <s> 0, </s> 1, <|user|> 2; adds <s> in front of a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, USER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    # Stored as plain text, not in the byte alphabet.
    tokenizer.add_tokens([AddedToken("two words ✓", special=False)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """The shape of Llama 2: ▁ for spaces, one token per unknown byte, one leading space stripped when decoding."""
    words = ["▁", "▁the", "▁In", "▁beginning", "▁God", "e", "t", "h", "a", "n", "d", "▁a", "nd", "I", "."]
    vocab = {BOS: 0, EOS: 1, "<unk>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    merges = [("n", "d"), ("▁", "a")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([BOS, EOS, "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Unigram with a Metaspace decoder, the shape of T5 and ALBERT."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁earth", -1.5)] + [(c, -4.0) for c in "abcdehrt"]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def without_unknown() -> tokenizers.Tokenizer:
    """Unigram without a token for unknown characters: it refuses a text with characters other than `a` and `b`."""
    return tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("b", -1.0)]))
