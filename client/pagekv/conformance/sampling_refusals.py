"""Bad sampling parameters of a sequence that enters: the bounds that StepSampling names, one by one."""

from __future__ import annotations

import math
from typing import Any

from pagekv.conformance.played import neutral
from pagekv.conformance.scene import HUGE, BadStep, LiveScene
from pagekv.steps.v1 import executor_service_pb2 as pb

LOGPROBS = pb.EXECUTOR_FEATURE_LOGPROBS
LOGIT_BIAS = pb.EXECUTOR_FEATURE_LOGIT_BIAS
MIN_TOKENS = pb.EXECUTOR_FEATURE_MIN_TOKENS
PENALTIES = pb.EXECUTOR_FEATURE_PENALTIES
# Entries that banned_until_min and bias_token_ids may have.
MAX_IDS = 1024
PATH = "new_seqs[0].sampling"

# Field, values out of its bounds, and the feature that it belongs to.
NUMBERS: tuple[tuple[str, tuple[float, ...], int], ...] = (
    ("temperature", (-0.1, 100.5, math.nan, math.inf), 0),
    ("top_p", (0.0, 1.5, -1.0, math.nan), 0),
    ("min_p", (-0.1, 1.5, math.nan), 0),
    ("repetition_penalty", (0.0, 10.5, -1.0, math.nan), PENALTIES),
    ("presence_penalty", (-2.5, 2.5, math.nan), PENALTIES),
    ("frequency_penalty", (-2.5, 2.5, math.nan), PENALTIES),
)


def _bad(words: str, fields: dict[str, Any], named: str, needs: int = 0) -> BadStep:
    def columns(scene: LiveScene) -> dict[str, Any]:
        values = {name: value(scene) if callable(value) else value for name, value in fields.items()}
        return scene.entering(sampling=neutral(**values))

    return BadStep(words, columns, [f"{PATH}.{named}"], needs=needs)


def _unrequired(field: str, value: Any, *fields: str) -> BadStep:
    values = {field: value, "biases": [1.0]} if field == "bias_token_ids" else {field: value}
    named = [f"{PATH}.{name}" for name in (field, *fields)]
    return BadStep(f"{field} without its feature", lambda s: s.entering(sampling=neutral(**values)), named, features=())


UNSET = BadStep("no sampling", lambda s: s.entering(sampling=None), [PATH])
BAD_SAMPLING: dict[str, tuple[BadStep, ...]] = {
    "R18": (
        *(_bad(f"{name} {value}", {name: value}, name, needs) for name, values, needs in NUMBERS for value in values),
        _bad("top_k above the vocabulary", {"top_k": lambda s: s.vocab + 1}, "top_k"),
        _bad("min_tokens above the model", {"min_tokens": lambda s: s.max_len + 1}, "min_tokens", MIN_TOKENS),
        _bad(
            "logprobs above max_logprobs",
            {"logprobs": lambda s: s.kit.description.max_logprobs + 1},
            "logprobs",
            LOGPROBS,
        ),
        *(
            _bad(f"a bias of {bias}", {"bias_token_ids": [0], "biases": [bias]}, "biases[0]", LOGIT_BIAS)
            for bias in (-100.5, 100.5, math.nan)
        ),
    ),
    "R19": (
        _bad(
            "a banned id too high",
            {"min_tokens": 1, "banned_until_min": lambda s: [0, s.vocab]},
            "banned_until_min[1]",
            MIN_TOKENS,
        ),
        _bad(
            "too many banned ids",
            {"min_tokens": 1, "banned_until_min": [0] * (MAX_IDS + 1)},
            "banned_until_min",
            MIN_TOKENS,
        ),
        _bad("a biased id too high", {"bias_token_ids": [HUGE], "biases": [1.0]}, "bias_token_ids[0]", LOGIT_BIAS),
        _bad("a biased id twice", {"bias_token_ids": [0, 0], "biases": [1.0, 1.0]}, "bias_token_ids", LOGIT_BIAS),
        _bad("biases too few", {"bias_token_ids": [0, 1], "biases": [1.0]}, "biases", LOGIT_BIAS),
    ),
}
UNREQUIRED = (
    _unrequired("logprobs", 0),
    _unrequired("bias_token_ids", [0], "biases"),
    _unrequired("min_tokens", 1),
    _unrequired("repetition_penalty", 1.5),
    _unrequired("presence_penalty", 0.5),
    _unrequired("frequency_penalty", 0.5),
)
