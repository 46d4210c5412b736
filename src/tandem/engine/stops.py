"""Finds stop strings in a text that arrives in pieces. It does not know tokens.

The match that is *completed* first counts, and of those completed at the same character the longest. That rule gives
the same cut however the text is divided into pieces, so streams and whole answers agree (C15).
"""

from collections.abc import Sequence


class StopFinder:
    """Holds back the shortest tail of the text that may still become a stop string; releases the rest.

    include  the stop string itself belongs to the answer.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.match: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take in new text; returns what is released. A stop that is completed while may_stop is False is plain text.

        Once ``match`` is set, to the stop that was found, nothing may be pushed any more.
        """
        assert self.match is None
        if not self._stops:
            return text
        # Whatever a match may begin in is still held, so the held text and the new one are all there is to search.
        buffer = self._held + text
        found = self._find(buffer, len(self._held)) if may_stop and text else None
        if found is not None:
            start, end, self.match = found
            self._held = ""
            return buffer[: end if self._include else start]
        keep = self._possible_prefix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Release what is held back: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, old: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the first match completed behind text[:old]."""
        found = [(text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        end, start, stop = min(matches)
        return start, end, stop

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of text that is the beginning of a stop, but not a whole one."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
