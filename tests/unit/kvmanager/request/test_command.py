"""Sampling parameters of a request."""

from __future__ import annotations

from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams


def test_a_sequence_ends_with_stop_tokens_and_unless_ignored_the_models_own() -> None:
    assert SamplingParams(stop_token_ids=(5, 6)).end_ids((1, 2)) == {1, 2, 5, 6}
    assert SamplingParams(stop_token_ids=(5, 6), ignore_eos=True).end_ids((1, 2)) == {5, 6}
    assert SamplingParams().end_ids(()) == frozenset()


def test_what_is_not_asked_for_changes_nothing() -> None:
    sampling = SamplingParams()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (16, 0, False)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert (sampling.logprobs, sampling.logit_bias, sampling.stop_token_ids) == (None, {}, ())
    assert (sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (0, 1, False)
    command = GenerateCommand("r", [1], sampling)
    assert (command.n, command.resumed_tokens, command.priority) == (1, 0, 0)
