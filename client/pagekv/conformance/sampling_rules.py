"""Layer three, sampling: rules M9 and M13 to M16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pagekv.conformance.answers import MARGIN, NUM_OUTPUTS, TOLERANCE, Answer
from pagekv.conformance.kit import Kit, Rule
from pagekv.conformance.played import PlayedSequence
from pagekv.conformance.verdict import NotTested, during, require
from pagekv.steps.v1 import executor_service_pb2 as pb

# So hot that all tokens are nearly as likely, and the draw alone decides.
HOT = 100.0
NUM_DRAWS = 12
# At that heat it leaves out tokens that are less likely than the likeliest by a factor of e.
MIN_P = 0.99
# Draws of a vocabulary so small are often equal.
MIN_VOCAB = 16
# So many penalties of 2 outweigh any logits.
NUM_REPEATS = 60
# Of SampledLogprobs.
MAX_LOGPROB = 1e-3


def next_tokens(kit: Kit, requests: Sequence[tuple[Sequence[int], int, dict[str, Any]]]) -> list[PlayedSequence]:
    """Sequences of tokens, of which so many are prompt, with this sampling, that sampled one token, each alone."""
    played = []
    with kit.epoch() as epoch:
        for tokens, num_prompt, sampling in requests:
            seq = epoch.sequence(tokens, num_prompt, **sampling)
            epoch.step([seq])
            epoch.leave(seq)
            played.append(seq)
    return played


def draws_are_functions(kit: Kit) -> None:
    """Of seed, sequence_index and position: the same whatever happens, and others for each other number."""
    if kit.description.vocab_size < MIN_VOCAB:
        raise NotTested(f"draws from a vocabulary of {kit.description.vocab_size} are often equal by chance")
    prompts = kit.answers.prompts
    named: dict[str, dict[str, Any]] = {
        "seed 7, index 0": {"seed": 7},
        "seed 8, index 0": {"seed": 8},
        "seed 7, index 1": {"seed": 7, "sequence_index": 1},
        "the highest seed": {"seed": 2**64 - 1},
    }
    draws: dict[str, list[int]] = {}
    with kit.epoch() as epoch:
        for name, seeds in named.items():
            draws[name] = epoch.alone(prompts[0], NUM_DRAWS, temperature=HOT, **seeds).outputs
    names = list(named)
    for at, name in enumerate(names):
        for other in names[at + 1 :]:
            require(draws[name] != draws[other], f"{name} and {other} draw the same: {draws[name]}")
        spread = max(draws[name]) - min(draws[name])
        wide = spread >= kit.description.vocab_size // 8
        require(wide, f"{name} draws {draws[name]}: the position does not matter")
    expected = draws[names[0]]
    with kit.epoch() as epoch:
        mate = epoch.sequence(prompts[1], temperature=HOT, seed=7)
        seq = epoch.sequence(prompts[0], temperature=HOT, **named[names[0]])
        epoch.step([mate])
        epoch.step([seq], counts={seq: 2})
        epoch.step(counts={seq: seq.length - seq.computed})
        epoch.decode(2)
        again = epoch.sequence(seq.tokens, seq.num_prompt, temperature=HOT, **named[names[0]])
        epoch.step([again], finish=[seq])
        epoch.decode(3)
    same = again.outputs == expected[: len(again.outputs)]
    require(same, f"in chunks, beside another and come again: {again.outputs} instead of {expected}")
    _filters_leave_tokens_out(kit)


def _filters_leave_tokens_out(kit: Kit) -> None:
    """Filters at their strictest leave the likeliest token alone. Log-probabilities tell what wider ones leave."""
    prompt = kit.answers.prompts[0]
    kit.answers.of(prompt)
    strictest = {"top_k": 1, "top_p": 0.5 / kit.description.vocab_size, "min_p": 1.0}
    with kit.epoch() as epoch:
        for name, value in strictest.items():
            seq = epoch.alone(prompt, NUM_OUTPUTS, temperature=HOT, seed=7, **{name: value})
            kit.answers.compare(seq, f"drawn with {name} {value}")
        if kit.target.num_logprobs is None:
            return
        for seed in range(NUM_DRAWS):
            seq = epoch.alone(prompt, 1, temperature=HOT, seed=seed, top_k=2)
            row = seq.rows[0]
            right = row.chosen >= row.top_logprobs[1] - MARGIN
            require(right, f"drawn with top_k 2, seed {seed}: token {seq.tokens[-1]}, likeliest {row.top_token_ids}")
            seq = epoch.alone(prompt, 1, temperature=HOT, seed=seed, min_p=MIN_P)
            row = seq.rows[0]
            right = row.chosen >= row.top_logprobs[0] + HOT * math.log(MIN_P) - MARGIN
            require(right, f"drawn with min_p {MIN_P}, seed {seed}: token {seq.tokens[-1]} is too unlikely")


def _prompt_and_answer(kit: Kit) -> tuple[list[int], Answer]:
    """Of an executor with other tokens than the answer's. Raises NotTested."""
    if kit.description.vocab_size < 2:
        raise NotTested("the vocabulary has one token")
    prompt = kit.answers.prompts[0]
    return prompt, kit.answers.of(prompt)


def bans_end_with_min_tokens(kit: Kit) -> None:
    kit.need(pb.EXECUTOR_FEATURE_MIN_TOKENS)
    prompt, answer = _prompt_and_answer(kit)
    known = next((index for index in range(NUM_OUTPUTS - 1, 0, -1) if answer.is_clear(index)), None)
    if known is None:
        raise NotTested("every token is a near tie")
    tokens, banned = [*prompt, *answer.tokens[:known]], answer.tokens[known]
    cases = (
        ("one too few", len(prompt), known + 1, False),
        ("just as many", len(prompt), known, True),
        ("as many, but all of them prompt", len(tokens), known, False),
    )
    requests = [
        (tokens, num_prompt, {"min_tokens": least, "banned_until_min": [banned]}) for _, num_prompt, least, _ in cases
    ]
    for seq, (words, _, least, free) in zip(next_tokens(kit, requests), cases, strict=True):
        allowed = seq.tokens[-1] == banned
        what = f"min_tokens {least}, and the sequence has {words}: token {seq.tokens[-1]}"
        require(allowed == free, f"{what}, {banned} is {'not ' * free}banned")
    with kit.epoch() as epoch:
        least = NUM_OUTPUTS // 2
        # A ban of the whole vocabulary could not be kept.
        ban = sorted(set(answer.tokens[: least + 1]))[: kit.description.vocab_size - 1]
        seq = epoch.alone(prompt, NUM_OUTPUTS, min_tokens=least, banned_until_min=ban)
    early = set(seq.outputs[:least]) & set(ban)
    require(not early, f"tokens {sorted(early)} are sampled before min_tokens {least}: {seq.outputs}")


def biases_force_and_forbid(kit: Kit) -> None:
    kit.need(pb.EXECUTOR_FEATURE_LOGIT_BIAS)
    prompt, answer = _prompt_and_answer(kit)
    forced = next(token for token in [*kit.answers.random_tokens(8, 3), 0, 1] if token != answer.tokens[0])
    with kit.epoch() as epoch:
        seq = epoch.alone(prompt, 3, bias_token_ids=[forced], biases=[100.0])
        require(set(seq.outputs) == {forced}, f"a bias of 100 for {forced}: {seq.outputs}")
        seq = epoch.alone(prompt, 3, bias_token_ids=[answer.tokens[0]], biases=[-100.0])
        require(answer.tokens[0] not in seq.outputs, f"a bias of -100 for {answer.tokens[0]}: {seq.outputs}")
        both = epoch.sequence(prompt, bias_token_ids=[forced, answer.tokens[0]], biases=[100.0, -100.0])
        plain = epoch.sequence(kit.answers.prompts[1])
        epoch.step([both, plain])
        require(both.outputs == [forced], f"beside another a bias of 100 for {forced}: {both.outputs}")
        kit.answers.compare(plain, "a sequence beside one with biases")


def logprobs_are_of_raw_logits(kit: Kit) -> None:
    kit.need(pb.EXECUTOR_FEATURE_LOGPROBS)
    prompt, vocab = kit.answers.prompts[0], kit.description.vocab_size
    most = kit.description.max_logprobs
    counts = sorted({0, min(1, most), min(3, most), most})
    with kit.epoch() as epoch:
        seqs = [epoch.sequence(prompt, logprobs=count) for count in counts]
        silent = epoch.sequence(prompt)
        silent.sampling.ClearField("logprobs")
        epoch.step([*seqs, silent])
    for seq, count in zip(seqs, counts, strict=True):
        with during(f"logprobs {count}"):
            _check_row(seq, min(count, vocab))
    raw = seqs[-1].rows[0]
    likeliest = dict(zip(raw.top_token_ids, raw.top_logprobs, strict=True))
    hot: dict[str, dict[str, Any]] = {"at temperature 2": {"temperature": 2.0, "seed": 5}}
    if pb.EXECUTOR_FEATURE_LOGIT_BIAS in kit.target.features:
        hot["with a bias"] = {"bias_token_ids": [seqs[-1].tokens[-1]], "biases": [-100.0]}
    requests = [(prompt, len(prompt), {"logprobs": most, **sampling}) for sampling in hot.values()]
    for words, seq in zip(hot, next_tokens(kit, requests), strict=True):
        row = seq.rows[0]
        values = [*zip(row.top_token_ids, row.top_logprobs, strict=True), (seq.tokens[-1], row.chosen)]
        for token, value in values:
            off = abs(value - likeliest.get(token, value))
            require(off <= TOLERANCE, f"{words} the log-probability of token {token} moves by {off:.3f}")


def _check_row(seq: PlayedSequence, count: int) -> None:
    (row,) = seq.rows
    top, token = list(row.top_logprobs), seq.tokens[-1]
    require(len(set(row.top_token_ids)) == count, f"likeliest tokens {list(row.top_token_ids)} repeat")
    found = max([row.chosen, *top])
    require(found <= MAX_LOGPROB, f"a log-probability is {found}, at most {MAX_LOGPROB} by rounding")
    require(top == sorted(top, reverse=True), f"the likeliest are not best first: {top}")
    if count:
        clear = count == 1 or top[0] - top[1] >= MARGIN
        require(not clear or row.top_token_ids[0] == token, f"the likeliest is {row.top_token_ids[0]}, sampled {token}")
        require(abs(row.chosen - top[0]) <= MARGIN, f"chosen is {row.chosen}, the likeliest has {top[0]}")


def penalties_count(kit: Kit) -> None:
    kit.need(pb.EXECUTOR_FEATURE_PENALTIES)
    start = kit.answers.prompts[1]
    if len(start) + NUM_REPEATS >= kit.description.max_model_len:
        raise NotTested("max_model_len is too short")
    repeated = start[0]
    tokens = [*start, *[repeated] * NUM_REPEATS]
    (plain,) = next_tokens(kit, [(tokens, len(tokens), {})])
    greedy = plain.tokens[-1]
    for penalty, comes in ((2.0, False), (-2.0, True)):
        sampling = {"frequency_penalty": penalty}
        output, prompt = next_tokens(kit, [(tokens, len(start), sampling), (tokens, len(tokens), sampling)])
        what = f"frequency_penalty {penalty}, token {repeated} stands {NUM_REPEATS} times in the"
        require((output.tokens[-1] == repeated) == comes, f"{what} output: {output.tokens[-1]} comes next")
        if Answer(plain.outputs, plain.rows).is_clear(0):
            require(prompt.tokens[-1] == greedy, f"{what} prompt: {prompt.tokens[-1]} comes next, not {greedy}")
    _repetition_counts_both(kit)
    _presence_counts_output(kit)


def _repetition_counts_both(kit: Kit) -> None:
    """Output is no other thing to it than prompt."""
    start = kit.answers.prompts[0]
    for penalty in (0.1, 10.0):
        sampling = {"repetition_penalty": penalty}
        requests = [(start, num_prompt, sampling) for num_prompt in (1, len(start))]
        output, prompt = (seq.tokens[-1] for seq in next_tokens(kit, requests))
        require(
            output == prompt, f"repetition_penalty {penalty}: {output} after output, {prompt} after the same prompt"
        )


def _presence_counts_output(kit: Kit) -> None:
    """Where the likeliest tokens are known, so is what a penalty makes of them."""
    if pb.EXECUTOR_FEATURE_LOGPROBS not in kit.target.features:
        return
    most = min(20, kit.description.max_logprobs)
    for prompt in kit.answers.prompts:
        (plain,) = next_tokens(kit, [(prompt, len(prompt), {"logprobs": most})])
        likeliest = dict(zip(plain.rows[0].top_token_ids, plain.rows[0].top_logprobs, strict=True))
        for penalty in (2.0, -2.0):
            for num_prompt, words in ((1, "output"), (len(prompt), "prompt")):
                output = set(prompt[num_prompt:])
                expected = _winner(likeliest, output, penalty)
                (seq,) = next_tokens(kit, [(prompt, num_prompt, {"presence_penalty": penalty})])
                what = f"presence_penalty {penalty} after {len(prompt)} tokens of {words}"
                require(expected in (None, seq.tokens[-1]), f"{what}: {seq.tokens[-1]} comes next, not {expected}")


def _winner(likeliest: dict[int, float], output: set[int], penalty: float) -> int | None:
    """The likeliest token after a penalty on those of the output; None where it cannot be told for certain."""
    after = {token: value - penalty * (token in output) for token, value in likeliest.items()}
    # Tokens that are not listed are no likelier than the last of the list.
    rivals = sorted([*after.values(), min(likeliest.values(), default=0.0) + max(0.0, -penalty)])
    best = max(after, key=lambda token: after[token], default=None)
    return best if best is not None and after[best] == rivals[-1] and rivals[-1] - rivals[-2] >= MARGIN else None


RULES: tuple[Rule, ...] = (
    Rule("M9", "a draw is a function of seed, sequence_index and position", draws_are_functions),
    Rule("M13", "bans end with min_tokens output tokens", bans_end_with_min_tokens),
    Rule("M14", "a bias forces and forbids", biases_force_and_forbid),
    Rule("M15", "log-probabilities are of the raw logits", logprobs_are_of_raw_logits),
    Rule("M16", "penalties count what they say", penalties_count),
)
