"""Sampling parameters of a request."""

from __future__ import annotations

from pagekv.kvmanager.request.command import SamplingParams


def test_a_sequence_ends_with_stop_tokens_and_unless_ignored_the_models_own() -> None:
    assert SamplingParams(stop_token_ids=(5, 6)).end_ids((1, 2)) == {1, 2, 5, 6}
    assert SamplingParams(stop_token_ids=(5, 6), ignore_eos=True).end_ids((1, 2)) == {5, 6}
    assert SamplingParams().end_ids(()) == frozenset()
