"""Train the demo model: a Llama of five million parameters, on two CPU cores, in under an hour.

    python tests/demo_model/train.py --minutes 50 --work /tmp/demo --out DIRECTORY

The schedule follows the clock and not a step count: whatever the speed of the machine, the
learning rate has reached zero when the budget is spent. The state is saved every few minutes
below ``--work``; the same command takes an interrupted run up again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from card import model_card
from corpus import ASSISTANT, CHAT_TEMPLATE, EOS, SYSTEM, USER, Corpus, build, chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCABULARY = 4096
CONTEXT = 2048
STEP_TOKENS = 4096
# (share of the time budget at which the stage ends, window length). Short windows train nearly
# twice as fast on a CPU; the long ones at the end teach the rotary embedding its far positions.
STAGES = ((0.50, 256), (0.75, 512), (0.88, 1024), (1.00, CONTEXT))
WARMUP_STEPS = 100
SAVE_SECONDS = 180.0

PROMPTS = (
    "In the beginning",
    "The king of Babylon said to his servants,",
    "The computer is",
)
QUESTIONS = ("What is a hacker?",)


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    epoch: int = 0


def make_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the training documents."""
    tokenizer = Tokenizer(models.BPE())
    # The prefix space is left out so that decode(encode(text)) gives the text back exactly.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, SYSTEM, USER, ASSISTANT],
        # All 256 bytes, so that any text at all can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a freshly initialised model of the demo's shape."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[torch.Tensor]:
    """Encode documents, each led by the end-of-text token, which thereby ends the one before."""
    eos = tokenizer.eos_token_id
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return [torch.tensor([eos, *ids], dtype=torch.long) for ids in encoded]


def windows(documents: list[torch.Tensor], length: int, seed: int) -> torch.Tensor:
    """Cut one epoch, its documents in random order, into windows of ``length + 1`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(documents), generator=generator).tolist()
    stream = torch.cat([documents[index] for index in order])
    # A random phase: the same text is cut at other places in every epoch.
    stream = stream[int(torch.randint(length, (1,), generator=generator)) :]
    cut = stream.unfold(0, length + 1, length)
    return cut[torch.randperm(len(cut), generator=generator)]


def batches(documents: list[torch.Tensor], length: int, progress: Progress) -> Iterator[torch.Tensor]:
    """Yield batches of ``STEP_TOKENS`` tokens for ever, counting epochs in ``progress``."""
    while True:
        progress.epoch += 1
        cut = windows(documents, length, progress.epoch)
        yield from torch.split(cut, STEP_TOKENS // length)


def token_losses(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of every token of a batch of windows but the first."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return losses.view(len(batch), -1)


@torch.no_grad()
def evaluate(model: torch.nn.Module, documents: list[torch.Tensor], length: int, limit: int = 10**9) -> torch.Tensor:
    """Return the mean loss at each position of held-out windows, ``limit`` tokens at most."""
    model.eval()
    cut = windows(documents, length, seed=0)[: max(1, limit // length)]
    rows = [token_losses(model, part) for part in torch.split(cut, max(1, STEP_TOKENS // length))]
    model.train()
    return torch.cat(rows).mean(0)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        # match_rms_adamw scales the update of each matrix so that AdamW's learning rates apply.
        torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def train(
    model: LlamaForCausalLM,
    corpus: tuple[list[torch.Tensor], list[torch.Tensor]],
    budget: float,
    checkpoint: Path,
) -> Progress:
    """Train for ``budget`` seconds of wall time, going on from ``checkpoint`` if it is there."""
    optimizers = make_optimizers(model)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    progress = Progress()
    if checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = Progress(**state["progress"])
        print(f"resumed at {progress}", flush=True)
    started = time.monotonic() - progress.seconds
    saved_at = progress.seconds
    running = 0.0
    source: Iterator[torch.Tensor] = iter(())
    length = 0
    while (share := progress.seconds / budget) < 1.0:
        wanted = next(window for end, window in STAGES if share < end)
        if wanted != length:
            length, source = wanted, batches(corpus[0], wanted, progress)
        factor = min(1.0, (progress.steps + 1) / WARMUP_STEPS) * (1.0 - share)
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss = token_losses(model, next(source)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        progress.steps += 1
        progress.tokens += STEP_TOKENS
        progress.seconds = time.monotonic() - started
        running = loss.item() if not running else 0.95 * running + 0.05 * loss.item()
        if progress.steps % 50 == 0:
            print(
                f"{progress.seconds:6.0f}s step {progress.steps} tokens {progress.tokens} epoch "
                f"{progress.epoch} window {length} loss {running:.3f}",
                flush=True,
            )
        if progress.seconds - saved_at > SAVE_SECONDS:
            saved_at = progress.seconds
            save_checkpoint(checkpoint, model, optimizers, progress)
            held_out = evaluate(model, corpus[1], 512, limit=16384).mean().item()
            print(f"{progress.seconds:6.0f}s held-out loss {held_out:.3f}", flush=True)
    save_checkpoint(checkpoint, model, optimizers, progress)
    return progress


def save_checkpoint(
    path: Path,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    progress: Progress,
) -> None:
    """Write everything needed to go on; a kill while writing leaves the previous file whole."""
    fresh = path.with_suffix(".new")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "progress": asdict(progress),
        },
        fresh,
    )
    os.replace(fresh, path)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the artefact in the Hugging Face format, the weights as bfloat16."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    copy = make_model(tokenizer)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    copy.bfloat16().save_pretrained(out)
    # The template goes inside tokenizer_config.json, where every reader looks for it.
    tokenizer.save_pretrained(out, save_jinja_files=False)
    # Readers of the format from before transformers 5 know these under their old names.
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    described = json.loads((out / "tokenizer_config.json").read_text())
    described.pop("backend", None)
    described["additional_special_tokens"] = described.pop("extra_special_tokens")
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    for file in out.iterdir():
        # safetensors creates its file unreadable to others, and a wheel would keep it so.
        file.chmod(0o644)


def generate(model: Any, tokenizer: Any, prompt: str, seed: int = 0) -> str:
    """Return the continuation of a prompt, sampled as generation_config.json says."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=100)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def report(out: Path, corpus: Corpus, progress: Progress, minutes: float) -> None:
    """Measure the artefact as it was written, print the result and write the model card."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    seen, encoded = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    by_position = evaluate(model, encoded, CONTEXT)
    loss = evaluate(model, encoded, 512).mean().item()
    tokens = sum(len(ids) for ids in encoded)
    size = sum(len(text.encode()) for text in corpus.held_out)
    numbers = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "minutes": minutes,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "train_tokens": sum(len(ids) for ids in seen),
        "train_loss": evaluate(model, seen, 512, limit=131072).mean().item(),
        "held_out_tokens": tokens,
        "loss": loss,
        "bits_per_byte": loss * tokens / size / math.log(2),
        "positions": {
            f"{start}-{start + 255}": by_position[start : start + 256].mean().item() for start in range(0, CONTEXT, 256)
        },
    }
    print(json.dumps(numbers, indent=2))
    samples = [(prompt, generate(model, tokenizer, prompt)) for prompt in PROMPTS]
    for question in QUESTIONS:
        # The answer marker is followed by a line break in the template, and by the reply here.
        prompt = EOS + chat(question, "")
        samples.append((question, generate(model, tokenizer, prompt)))
    for prompt, text in samples:
        print(f"--- {prompt}\n{text}\n")
    (out / "README.md").write_text(model_card(numbers, samples))
    total = sum(file.stat().st_size for file in out.iterdir())
    print(f"{total} bytes: " + ", ".join(sorted(file.name for file in out.iterdir())))


def main() -> None:
    """Run the whole thing: corpus, tokenizer, training, export, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=50.0, help="time budget of the training")
    parser.add_argument("--work", type=Path, required=True, help="for packages and checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="the artefact; it is replaced")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    corpus = build(arguments.work)
    tokenizer = make_tokenizer(corpus)
    documents = (encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out))
    counts = [sum(len(ids) for ids in part) for part in documents]
    print(f"tokens to train on: {counts[0]}, held out: {counts[1]}", flush=True)
    model = make_model(tokenizer)
    checkpoint = arguments.work / "checkpoint.pt"
    progress = train(model, documents, arguments.minutes * 60.0, checkpoint)
    export(model, tokenizer, arguments.out)
    report(arguments.out, corpus, progress, arguments.minutes)


if __name__ == "__main__":
    main()
