"""Finds stop strings in streamed text, also across chunks, and holds back text that may become one.

One Knuth-Morris-Pratt automaton per stop string advances character by character. So matches and released text depend
only on the text, not on how it is cut into chunks. O(1) amortised per character and stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once and shared by its sequences."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Each of `stops` is at least one character; they may overlap and repeat."""
        # Longest first: if several matches end at the same character, the one that begins first wins.
        self.patterns = [(stop, _overlaps(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self.beginnings = frozenset(stop[0] for stop in stops)


def _overlaps(pattern: str) -> list[int]:
    """For every prefix of the pattern, of length 1 to n: the length of its longest proper prefix that is also its
    suffix (the failure function of Knuth, Morris and Pratt).
    """
    overlaps = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = overlaps[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        overlaps[i] = length
    return overlaps


class StopMatcher:
    """Watches the text of one sequence. After a match it must not be fed again."""

    def __init__(self, stops: StopStrings) -> None:
        self._patterns, self._beginnings = stops.patterns, stops.beginnings
        # Per pattern: the length of its longest prefix with which the text so far ends.
        self._matched = [0] * len(self._patterns)
        # The end of the text fed so far that may be the beginning of a stop string: max(self._matched) characters.
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes in new text. Returns the text that can be released, and the stop string if one was completed.

        The match that ends first wins; the text stops before it. With `may_stop` False a stop string completed by this
        text is ordinary text (too early for min_tokens), but its beginning may still be completed by later text.
        """
        # The usual case: no stop string begins in this text, and none has begun before.
        if not self._patterns or (not self._held and self._beginnings.isdisjoint(text)):
            return text, None
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for which, (pattern, overlaps) in enumerate(self._patterns):
                length = self._matched[which]
                while length and pattern[length] != character:
                    length = overlaps[length - 1]
                if pattern[length] == character:
                    length += 1
                if length == len(pattern):
                    if may_stop:
                        self._held = ""
                        return buffer[: position - length], pattern
                    length = overlaps[length - 1]
                self._matched[which] = length
        keep = len(buffer) - max(self._matched)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """The text that is held back; to be called when no more text follows."""
        held, self._held = self._held, ""
        return held
