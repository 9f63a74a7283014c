"""The requests of chaos, the answers of an undisturbed stack, and how an answer is held against that."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from pagekv.client import wire
from pagekv.v1 import inference_service_pb2 as pb

VOCAB = 3000  # below the demo model's vocabulary


@dataclass(frozen=True)
class Spec:
    """One request; sent any number of times, it must bring the same answer each time."""

    name: str
    prompt: Any
    options: dict[str, Any]
    n: int = 1

    def message(self) -> pb.GenerateRequest:
        """For callers without our client."""
        options: Any = self.options  # a plain dictionary of what `SamplingOptions` has
        return wire.generate_request(self.prompt, self.n, options, only_complete=False)


@dataclass
class Answer:
    """The tokens of one sequence's stream."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    # The content of GenerateComplete: tokens, text and why it ended; None: the stream has not come to that.
    end: tuple[tuple[int, ...], str, str] | None = None


# By the index of the sequence.
Answers = dict[int, Answer]


def make_specs(rng: random.Random, count: int, longest: int) -> list[Spec]:
    """Requests of every kind: token ids, text and chat; greedy and sampled; stops, log-probabilities, penalties, beams,
    several sequences. Some share beginnings. `longest` is the most tokens they generate.
    """
    common = [rng.randrange(1, VOCAB) for _ in range(70)]
    specs = []
    for index in range(count):
        options: dict[str, Any] = {"max_tokens": rng.randint(longest // 2, longest), "ignore_eos": rng.random() < 0.7}
        tail = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 120))]
        prompt: Any = [*common[: rng.choice([0, 16, 48, 70])], *tail]
        n, kind = 1, index % 8
        if kind == 1:
            prompt = f"{index} days in the beginning God created the heaven and the earth"
        elif kind == 2:
            prompt = [{"role": "user", "content": f"Who made the heavens, {index} times?"}]
        elif kind == 3:
            n = rng.choice([2, 3])
        if kind == 4:
            options |= {"beam_width": rng.choice([2, 4]), "max_tokens": longest // 4}
            n = rng.randint(1, options["beam_width"])
        else:
            options |= {"temperature": float(rng.random() < 0.7), "seed": rng.randrange(2**63)}
        if kind == 5:
            options |= {"logprobs": 2, "min_tokens": 5}
        if kind == 6:
            options |= {"stop": ["never to be seen"], "stop_token_ids": [rng.randrange(VOCAB) for _ in range(20)]}
        specs.append(Spec(f"{index}", prompt, options, n))
    return specs


def take(answers: Answers, message: pb.GenerateResponse) -> None:
    """Adds a message of the wire to the answers of its call."""
    if message.HasField("chunk"):
        answer = answers.setdefault(message.chunk.index, Answer())
        answer.token_ids += message.chunk.token_ids
        answer.text += message.chunk.text
    else:
        end = message.complete
        reason = {1: "stop", 2: "length", 3: "abort"}.get(end.finish_reason, "none")
        answers.setdefault(end.index, Answer()).end = (tuple(end.token_ids), end.text, reason)


def difference(spec: Spec, got: Answers, wanted: Answers, *, whole: bool) -> str | None:
    """How an answer differs from the undisturbed one; None: not at all. Unless it is `whole`, what came so far must be
    how the other one begins.
    """
    for index, truth in wanted.items():
        answer = got.get(index, Answer())
        assert truth.end is not None
        tokens, text, _ = truth.end
        # Beams come with their end only.
        streamed = not spec.options.get("beam_width")
        if tuple(answer.token_ids) != tokens[: len(answer.token_ids)]:
            return f"request {spec.name} sequence {index}: other tokens than in the undisturbed run"
        if not text.startswith(answer.text):
            return f"request {spec.name} sequence {index}: other text than in the undisturbed run"
        if whole and answer.end != truth.end:
            return f"request {spec.name} sequence {index}: ended as {answer.end}, undisturbed as {truth.end}"
        if whole and streamed and (len(answer.token_ids), answer.text) != (len(tokens), text):
            return f"request {spec.name} sequence {index}: {len(answer.token_ids)} of {len(tokens)} tokens came"
    return None
