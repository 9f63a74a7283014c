"""Public-domain text for the demo model, taken from Debian packages.

Three sources, all in the public domain:

* ``bible-kjv-text``: the King James Version (1611), read with the package's own program;
* ``sword-text-web``: the World English Bible, a modern-English translation;
* ``jargon-text``: the Jargon File 4.4.7, which brings ordinary prose about computers.

The packages are downloaded with ``apt-get download`` and unpacked into a working directory;
nothing is installed and no root rights are needed.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import struct
import subprocess
import zlib
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("bible-kjv", "bible-kjv-text", "sword-text-web", "jargon-text")

# Whole books are held out, and in both translations: a chapter that is hidden in one and shown
# in the other would make the held-out loss look better than it is.
HELD_OUT_BOOKS = frozenset({"Ruth", "Jonah", "Ecclesiastes", "Romans", "James", "Philippians"})
# One Jargon File entry out of this many is held out.
HELD_OUT_ENTRY = 40

EOS = "<|endoftext|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a small demonstration model.",
    "Answer the question.",
)
_QUESTIONS = (
    "What is {}?",
    "What does {} mean?",
    "Explain {}.",
    "Define {}.",
    "Tell me about {}.",
    "What do hackers mean by {}?",
)
_CONTINUE = ("Continue: {}", "Go on from here: {}", "What comes next? {}", "{}")


@dataclass
class Corpus:
    """Documents to train on, and documents the model never sees."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def fetch(work: Path) -> Path:
    """Download and unpack the packages below ``work``; return the root of the unpacked tree."""
    root = work / "packages"
    done = root / ".complete"
    if not done.exists():
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, check=True)
        for package in sorted(root.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
        done.touch()
    return root


# Quotation marks (U+201C, U+201D, U+2018, U+2019) and the em dash.
_TYPED = (("\u201c", '"'), ("\u201d", '"'), ("\u2018", "'"), ("\u2019", "'"), ("\u2014", " - "))


def plain(text: str) -> str:
    """Replace typographic quotes and dashes by what a person types at a keyboard."""
    for fancy, typed in _TYPED:
        text = text.replace(fancy, typed)
    return re.sub(r" +", " ", text)


def kjv_books(root: Path) -> dict[str, list[list[str]]]:
    """Return the King James Version as book -> chapters -> verses."""
    # The package stores the text compressed in a format of its own, so its own reader prints it.
    # -l: a line width that no verse reaches, so that every verse is one line.
    command = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-l100000"]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    dump = subprocess.run(
        [*command, "gen1:1-rev22:21"], check=True, capture_output=True, text=True, env=environment
    ).stdout
    books: dict[str, list[list[str]]] = {}
    chapters: list[list[str]] = []
    for line in dump.splitlines():
        heading = re.fullmatch(r"(\d? ?[A-Z][A-Za-z ]+?) (\d+)", line)
        verse = re.fullmatch(r"\s+\d+ (.*)", line)
        if heading:
            chapters = books.setdefault(heading[1], [])
            chapters.append([])
        elif verse:
            chapters[-1].append(plain(verse[1].strip()))
    return books


def web_books(root: Path) -> dict[str, list[list[str]]]:
    """Return the World English Bible as book -> chapters -> paragraphs."""
    (folder,) = (root / "usr/share/sword/modules/texts/ztext").iterdir()
    markup = "".join(_sword_text(folder, testament) for testament in ("ot", "nt"))
    books: dict[str, list[list[str]]] = {}
    start_of_book = r'<div canonical="true" osisID="\w+" sID="[^"]*" type="book"/>'
    for part in re.split(start_of_book, markup)[1:]:
        name = re.search(r'<milestone n="([^"]+)" type="x-usfm-h"/>', part)
        if name is None:
            continue
        chapters = [_web_paragraphs(text) for text in re.split(r"<chapter [^>]*sID=[^>]*>", part)]
        # Before the first chapter is the title page of the book.
        books[name[1]] = [chapter for chapter in chapters[1:] if chapter]
    return books


def _sword_text(folder: Path, testament: str) -> str:
    """Decompress one testament of a SWORD ``zText`` module."""
    index = (folder / f"{testament}.bzs").read_bytes()
    blocks = (folder / f"{testament}.bzz").read_bytes()
    text = bytearray()
    for offset, length, _ in struct.iter_unpack("<III", index):
        text += zlib.decompress(blocks[offset : offset + length])
    return text.decode("utf-8")


def _web_paragraphs(markup: str) -> list[str]:
    # A footnote may be all that stands between two words, hence the blank in its place.
    markup = re.sub(r"<(note|title)\b[^>]*>.*?</\1>", " ", markup, flags=re.S)
    markup = re.sub(r'<(div [^>]*sID="[^"]*" type="x-p"|lg [^>]*sID=[^>]*|lb [^>]*)/>', "\0", markup)
    markup = re.sub(r"<l [^>]*/>", " ", markup)
    text = re.sub(r"<[^>]*>", "", markup)
    text = re.sub(r"\s+(?=[,.;:?!\u2019\u201d])", "", text)
    paragraphs = (plain(" ".join(part.split())) for part in text.split("\0"))
    return [paragraph for paragraph in paragraphs if paragraph]


def jargon_entries(root: Path) -> list[tuple[str, str]]:
    """Return the Jargon File's lexicon as (headword, definition) pairs."""
    with gzip.open(root / "usr/share/doc/jargon-text/jargon.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    entries: list[tuple[str, str]] = []
    for part in re.split(r"\n   :(?=\S[^\n]*:)", text)[1:]:
        head, _, body = part.partition(":")
        # The part of speech stays on the first line; pronunciation between slashes goes.
        grammar, _, body = body.partition("\n")
        grammar = re.sub(r"/[^/]*/,?", "", grammar).strip(" ,")
        # Links look like {this}; tables and drawings cannot be learnt by so small a model.
        body = body.replace("{", "").replace("}", "")
        paragraphs = [
            plain(" ".join(paragraph.split()))
            for paragraph in re.split(r"\n\s*\n", body)
            if not re.search(r"[─-╿│]|[-_|+=*.]{5}| {6}\S", paragraph)
        ]
        paragraphs = [paragraph for paragraph in paragraphs if len(paragraph) > 2]
        # A section heading after the last entry of a letter is one short word.
        if paragraphs and len(paragraphs[-1]) < 3:
            paragraphs.pop()
        if paragraphs and len(head) < 60:
            if grammar:
                paragraphs[0] = f"({grammar}) {paragraphs[0]}"
            entries.append((plain(head), "\n\n".join(paragraphs)))
    return entries


def chat(question: str, answer: str, system: str = "") -> str:
    """Return one exchange as the chat template writes it, without the leading marker."""
    start = f"{SYSTEM}\n{system}\n" if system else ""
    return f"{start}{USER}\n{question}\n{ASSISTANT}\n{answer}"


def build(work: Path, seed: int = 1) -> Corpus:
    """Fetch the sources and cut them into documents.

    Besides the plain text there are synthetic chat exchanges (a question about a Jargon File
    entry, or a verse to go on from), so that the model has met the chat markers and has learnt
    to end its turn.
    """
    root = fetch(work)
    rng = random.Random(seed)
    corpus = Corpus()

    def exchange(question: str, answer: str) -> str:
        system = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
        return chat(question, answer, system)

    for books, joint in ((kjv_books(root), " "), (web_books(root), "\n\n")):
        for name, chapters in books.items():
            held_out = name in HELD_OUT_BOOKS
            text = "\n\n".join(f"{name} {number}\n\n{joint.join(verses)}" for number, verses in enumerate(chapters, 1))
            (corpus.held_out if held_out else corpus.train).append(text)
            for verses in chapters if not held_out else []:
                # One exchange a chapter at most: enough to learn the form.
                first = rng.randrange(len(verses))
                answer = joint.join(verses[first + 1 : first + 1 + rng.randint(1, 3)])
                if 40 < len(answer) < 1200 and len(verses[first]) < 600:
                    question = rng.choice(_CONTINUE).format(verses[first])
                    corpus.train.append(exchange(question, answer))
    for number, (head, body) in enumerate(jargon_entries(root)):
        if number % HELD_OUT_ENTRY == 0:
            corpus.held_out.append(f"{head}: {body}")
            continue
        corpus.train.append(f"{head}: {body}")
        # The first long paragraph only: answers of a readable length that come to an end.
        answers = [paragraph for paragraph in body.split("\n\n") if len(paragraph) > 60]
        if answers:
            corpus.train.append(exchange(rng.choice(_QUESTIONS).format(head), answers[0]))
    return corpus
