"""Beam search decides what transformers' own beam search decides, token for token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.engine.fake_executor import beam_search
from transformers import LlamaConfig, LlamaForCausalLM

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.scheduling.beam_search import BeamSearch, Candidates, Continuation, Hypothesis

VOCAB = 48
WIDTHS = [2, 3, 4, 5, 8]
PENALTIES = [0.0, 0.5, 1.0, 2.0]
NEW = 8

Ranking = Callable[[Sequence[tuple[int, ...]], int], list[Candidates]]


@dataclass
class Case:
    """A small random model, a prompt and ids that end a hypothesis."""

    model: Any
    prompt: list[int]
    end_ids: list[int]

    def ranked(self, hypotheses: Sequence[tuple[int, ...]], count: int) -> list[Candidates]:
        """The `count` likeliest next tokens of the prompt with each of these continuations."""
        ids = torch.tensor([[*self.prompt, *tokens] for tokens in hypotheses])
        with torch.inference_mode():
            logprobs = self.model(ids).logits[:, -1].float().log_softmax(-1)
        best = logprobs.topk(min(count, VOCAB))
        return [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def reference(
        self, width: int, penalty: float, early: bool, num_return: int, new: int, least: int
    ) -> list[tuple[list[int], float]]:
        """Tokens and score of each hypothesis that transformers returns."""
        ids = torch.tensor([self.prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=num_return,
                length_penalty=penalty,
                early_stopping=early,
                max_new_tokens=new,
                min_new_tokens=least,
                do_sample=False,
                eos_token_id=self.end_ids or None,
                output_scores=True,
                return_dict_in_generate=True,
            )
        rows = [self._cut(row) for row in out.sequences[:, len(self.prompt) :].tolist()]
        return list(zip(rows, out.sequences_scores.tolist(), strict=True))

    def _cut(self, tokens: list[int]) -> list[int]:
        """Without the filling behind the first end token."""
        end = next((at for at, token in enumerate(tokens) if token in self.end_ids), len(tokens))
        return tokens[: end + 1]


def case_of(seed: int, num_end_ids: int) -> Case:
    """The end ids are tokens that greedy decoding with a few beams comes upon."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    case = Case(LlamaForCausalLM(config).eval(), torch.randint(1, VOCAB, (7,)).tolist(), [])
    search = beam_search(4, 4, 1.0, False, NEW, frozenset())
    run(search, case.ranked)
    met = [token for result in search.results() for token in result.token_ids[2:]]
    case.end_ids = sorted(set(met), key=met.index)[:num_end_ids]
    return case


def run(search: BeamSearch, ranked: Ranking) -> None:
    """To the end, checking what a caller relies on: its beams are the continuations of those before."""
    while not search.done:
        before = [beam.token_ids for beam in search.beams]
        continuing = search.advance(ranked(before, search.num_candidates))
        after = [beam.token_ids for beam in search.beams]
        assert after == [(*before[parent], token) for parent, token, _ in continuing]
        assert len(after) <= search.width
        assert all(a.logprob >= b.logprob for a, b in pairwise(search.beams))


@pytest.fixture(scope="module")
def cases() -> Iterator[list[Case]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small work: threads would wait for one another
    yield [case_of(seed, num_end_ids) for seed, num_end_ids in [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3), (5, 5)]]
    torch.set_num_threads(threads)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_results_are_those_of_transformers(cases: list[Case], penalty: float, early: bool) -> None:
    """Every result of a search, its order, tokens and score; ends by stop and by length both occur."""
    reasons: set[FinishReason] = set()
    shorter = 0
    for number, case in enumerate(cases):
        # Two widths each, others for another penalty. One beam is greedy search there, which has no scores: see below.
        for turn in range(2):
            width = WIDTHS[(number + PENALTIES.index(penalty) + 3 * turn) % len(WIDTHS)]
            least = 3 if turn and case.end_ids else 0
            search = beam_search(width, width, penalty, early, NEW, frozenset(case.end_ids), least)
            run(search, case.ranked)
            shorter += search.num_tokens < NEW
            expected = case.reference(width, penalty, early, width, NEW, least)
            assert [list(found.token_ids) for found in search.results()] == [tokens for tokens, _ in expected]
            for found, (_, score) in zip(search.results(), expected, strict=True):
                assert found.score == pytest.approx(score, rel=1e-4, abs=1e-5)
                assert found.score == pytest.approx(found.logprob / len(found.token_ids) ** penalty)
                assert (found.finish is FinishReason.STOP) == (found.token_ids[-1] in case.end_ids)
                reasons.add(found.finish)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert shorter, "hardly any search was over before max_new_tokens"


def test_fewer_results_are_the_best_ones(cases: list[Case]) -> None:
    for num_return in (1, 3):
        search = beam_search(5, num_return, 1.0, False, NEW, frozenset(cases[1].end_ids))
        run(search, cases[1].ranked)
        expected = cases[1].reference(5, 1.0, False, num_return, NEW, 0)
        assert [list(found.token_ids) for found in search.results()] == [tokens for tokens, _ in expected]


def test_negative_length_penalties_are_those_of_transformers(cases: list[Case]) -> None:
    for case in cases[1:]:
        search = beam_search(3, 3, -1.5, False, NEW, frozenset(case.end_ids))
        run(search, case.ranked)
        expected = case.reference(3, -1.5, False, 3, NEW, 0)
        assert [list(found.token_ids) for found in search.results()] == [tokens for tokens, _ in expected]


def test_one_beam_is_greedy_decoding(cases: list[Case]) -> None:
    for case in cases:
        search = beam_search(1, 1, 1.0, False, NEW, frozenset(case.end_ids))
        run(search, case.ranked)
        (found,) = search.results()
        tokens: list[int] = []
        while len(tokens) < NEW and not (tokens and tokens[-1] in case.end_ids):
            tokens.append(case.ranked([tuple(tokens)], 1)[0][0][0])
        assert list(found.token_ids) == tokens


def test_one_new_token_is_the_likeliest_few(cases: list[Case]) -> None:
    search = beam_search(4, 4, 1.0, False, 1, frozenset(cases[1].end_ids))
    run(search, cases[1].ranked)
    best = cases[1].ranked([()], 4)[0]
    assert [(found.token_ids, found.logprob) for found in search.results()] == [((t,), p) for t, p in best]


def test_the_logprob_is_the_sum_over_the_tokens(cases: list[Case]) -> None:
    case = cases[3]
    search = beam_search(3, 3, 1.0, False, NEW, frozenset(case.end_ids))
    run(search, case.ranked)
    for found in search.results():
        total = 0.0
        for at, token in enumerate(found.token_ids):
            total += dict(case.ranked([found.token_ids[:at]], VOCAB)[0])[token]
        assert found.logprob == pytest.approx(total, abs=1e-4)


def scripted(rows: dict[tuple[int, ...], dict[int, float]]) -> Ranking:
    """Probabilities by what was generated before; every other token is as good as impossible."""

    def ranked(hypotheses: Sequence[tuple[int, ...]], count: int) -> list[Candidates]:
        return [
            sorted(((t, math.log(p)) for t, p in rows[tokens].items()), key=lambda pair: -pair[1])[:count]
            for tokens in hypotheses
        ]

    return ranked


def test_a_step_by_hand() -> None:
    """Token 9 ends, and is kept when it is among the best two of all, and only then."""
    search = beam_search(2, 2, 0.0, False, 9, frozenset({9}))
    assert search.num_candidates == 3
    log = math.log
    assert search.advance([[(1, log(0.6)), (2, log(0.3)), (9, log(0.1))]]) == [
        Continuation(0, 1, log(0.6)),
        Continuation(0, 2, log(0.3)),
    ]
    assert search.results() == []
    # 0.6 * 0.5 = 0.3 ends, 0.6 * 0.4 = 0.24 and 0.3 * 0.7 = 0.21 go on; 0.3 * 0.2 = 0.06 is not among the best two.
    continuing = search.advance([[(9, log(0.5)), (3, log(0.4)), (4, log(0.1))], [(5, log(0.7)), (9, log(0.2))]])
    assert continuing == [Continuation(0, 3, log(0.4)), Continuation(1, 5, log(0.7))]
    (ended,) = search.results()
    assert (ended.token_ids, ended.finish) == ((1, 9), FinishReason.STOP)
    assert ended.logprob == ended.score == pytest.approx(log(0.3))
    # Both beams end, and the worse of the three is dropped: nothing left can be better than the other two.
    assert search.advance([[(9, log(0.9)), (6, log(0.1))], [(9, log(0.8)), (6, log(0.2))]]) == []
    assert search.done
    assert [found.token_ids for found in search.results()] == [(1, 9), (1, 3, 9)]


def test_a_beam_may_have_several_children_and_others_none() -> None:
    search = beam_search(2, 1, 1.0, False, 9, frozenset())
    log = math.log
    search.advance([[(1, log(0.9)), (2, log(0.1))]])
    assert search.advance([[(3, log(0.5)), (4, log(0.5))], [(5, log(0.9)), (6, log(0.1))]]) == [
        Continuation(0, 3, log(0.5)),
        Continuation(0, 4, log(0.5)),
    ]
    assert [beam.token_ids for beam in search.beams] == [(1, 3), (1, 4)]


def test_end_tokens_are_passed_over_until_min_tokens() -> None:
    rows = {(): {9: 0.8, 1: 0.15, 2: 0.05}, (1,): {9: 0.9, 3: 0.06, 4: 0.04}, (2,): {9: 0.9, 3: 0.06, 4: 0.04}}
    found: list[list[Hypothesis]] = []
    for least in (0, 1):
        search = beam_search(1, 1, 0.0, False, 9, frozenset({9}), least)
        run(search, scripted(rows))
        found.append(search.results())
    assert [results[0].token_ids for results in found] == [(9,), (1, 9)]


def test_early_stopping_takes_the_first_that_end() -> None:
    """Two have ended after two tokens; the best beam still promises more, and only the patient search waits for it."""
    rows = {
        (): {9: 0.5, 1: 0.3, 2: 0.2},
        (1,): {3: 0.9, 4: 0.1},
        (2,): {9: 0.9, 5: 0.1},
        (1, 3): {9: 0.99, 3: 0.01},
        (1, 4): {6: 1.0},
    }
    for early, expected in ((True, [(9,), (2, 9)]), (False, [(1, 3, 9), (9,)])):
        search = beam_search(2, 2, 1.0, early, 9, frozenset({9}))
        run(search, scripted(rows))
        assert [found.token_ids for found in search.results()] == expected
        # However few results are asked for, as many as there are beams must have ended.
        fewer = beam_search(2, 1, 1.0, early, 9, frozenset({9}))
        run(fewer, scripted(rows))
        assert [found.token_ids for found in fewer.results()] == expected[:1]
        assert fewer.num_tokens == search.num_tokens


def test_too_small_a_vocabulary_ends_with_what_there_is() -> None:
    search = beam_search(4, 4, 1.0, False, 3, frozenset({0, 1}))
    assert search.advance([[(0, -0.7), (1, -0.7)]]) == []
    assert search.done
    assert [found.token_ids for found in search.results()] == [(0,), (1,)]


def test_a_step_needs_candidates_of_every_beam() -> None:
    search = beam_search(2, 1, 1.0, False, 4, frozenset())
    with pytest.raises(ValueError, match="longer"):
        search.advance([[(1, -1.0)], [(2, -1.0)]])
    assert search.num_tokens == 0
    assert len(search.beams) == 1
