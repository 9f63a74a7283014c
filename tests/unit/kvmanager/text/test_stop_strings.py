"""Stop strings against an oracle that looks at the whole text, for any way of cutting it into chunks."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagekv.kvmanager.text.stop_strings import StopMatcher, StopStrings

# Two letters, so that stop strings overlap each other and themselves all the time.
WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


def oracle(text: str, stops: list[str], start: int = 0) -> tuple[str, str | None]:
    """The match that ends first, at `start` + 1 or later, the longest of those; text before it."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(chunks: list[str], stops: list[str], first_stopping_chunk: int = 0) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops))
    released = ""
    for number, chunk in enumerate(chunks):
        text, match = matcher.feed(chunk, number >= first_stopping_chunk)
        released += text
        if match is not None:
            return released, match
    return released + matcher.flush(), None


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=12), st.lists(WORDS, max_size=4))
@example(["ab", "cd"], ["abcd", "bc"])
def test_any_cut_gives_what_the_whole_text_gives(chunks: list[str], stops: list[str]) -> None:
    assert run(chunks, stops) == oracle("".join(chunks), stops)


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=8), st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 8)
)
def test_matches_completed_before_min_tokens_are_text(chunks: list[str], stops: list[str], first: int) -> None:
    start = len("".join(chunks[:first]))
    assert run(chunks, stops, first) == oracle("".join(chunks), stops, start)


@given(st.lists(st.text(alphabet="ab", max_size=6), max_size=12), st.lists(WORDS, min_size=1, max_size=4))
def test_held_text_is_the_longest_beginning_of_a_stop_string(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    released = seen = ""
    for chunk in chunks:
        text, match = matcher.feed(chunk)
        released, seen = released + text, seen + chunk
        if match is not None:
            return
        held = seen[len(released) :]
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert held == max((b for b in beginnings if seen.endswith(b)), key=len)


def test_every_short_stop_string_is_found_in_every_short_text() -> None:
    """All of one to four letters in all of eight, letter by letter: every way in which one can overlap itself."""
    words = ["".join(letters) for length in range(1, 5) for letters in product("ab", repeat=length)]
    for stop in words:
        for letters in product("ab", repeat=8):
            assert run(list(letters), [stop]) == oracle("".join(letters), [stop])


def test_the_overlaps_of_a_stop_string_with_itself() -> None:
    """Of every beginning: its longest shorter beginning that is its end too."""
    for length in range(1, 9):
        for letters in product("ab", repeat=length):
            stop = "".join(letters)
            ((found, overlaps),) = StopStrings([stop]).patterns
            assert found == stop
            for end in range(1, length + 1):
                shorter = [size for size in range(end) if stop[:end].endswith(stop[:size])]
                assert overlaps[end - 1] == max(shorter)


def test_text_stops_before_a_string_that_crosses_chunks() -> None:
    matcher = StopMatcher(StopStrings(["\n\nHuman:"]))
    assert matcher.feed("fine.\n") == ("fine.", None)
    assert matcher.feed("\nHum") == ("", None)
    assert matcher.feed("an: and more") == ("", "\n\nHuman:")


def test_held_text_is_released_when_it_turns_out_to_be_ordinary() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.feed("the E") == ("the ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("E") == ("EN", None)
    assert matcher.flush() == "E"


@pytest.mark.parametrize("stops", [["aab", "ab"], ["ab", "aab"]])
def test_of_matches_that_end_together_the_longest_wins_in_any_order(stops: list[str]) -> None:
    assert run(["xa", "ab"], stops) == ("x", "aab")


def test_nothing_is_held_behind_a_match() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.feed("xE") == ("x", None)
    assert matcher.feed("ND") == ("", "END")
    assert matcher.flush() == ""


def test_no_stop_strings_release_everything() -> None:
    assert run(["a", "b"], []) == ("ab", None)
