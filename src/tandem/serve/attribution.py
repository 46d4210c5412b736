"""Which of an answer's tokens make its thought and its texts. It knows places of characters, not how they were found.

    <think>Hm.</think> So: <tool_call>…</tool_call>      parts are "Hm." and "So:"; marks and calls belong to none

A token belongs to the first part that holds one of its characters. One without characters stands where the next
character would. So it is a matter of the tokens alone, however the answer was cut on its way.
"""

from collections import deque
from collections.abc import Sequence

import orjson

from tandem.request import TokenLogprobs
from tandem.serve.logprobs import Offsets, Tokens, chat_entries

Entry = orjson.Fragment | None


class Attribution:
    """Tokens as they come, until it is known to which part they belong.

    offsets   where they stand.      shows_logprobs   entries are written; else they are None.
    """

    def __init__(self, tokens: Tokens, offsets: Offsets, *, shows_logprobs: bool) -> None:
        self._tokens, self._offsets, self._shows = tokens, offsets, shows_logprobs
        self._waiting: deque[tuple[int, int, Entry]] = deque()

    def come(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """The next tokens. Their entries are written at once: every event that shows them only copies."""
        entries: list[Entry] = [None] * len(token_ids)
        if self._shows:
            entries = [orjson.Fragment(orjson.dumps(entry)) for entry in chat_entries(self._tokens, logprobs or ())]
        for (begin, end), entry in zip(self._offsets.spans(token_ids), entries, strict=True):
            self._waiting.append((begin, max(end, begin + 1), entry))

    def of_part(self, begin: int, end: int) -> list[Entry]:
        """Entries of the tokens that belong to these characters, which come in order; those before belong to none."""
        found = []
        while self._waiting and self._waiting[0][0] < end:
            _, end_of_token, entry = self._waiting.popleft()
            if end_of_token > begin:
                found.append(entry)
        return found

    def behind(self, end: int) -> list[Entry]:
        """Entries of the tokens that begin where the answer's text has ended, or later."""
        return [entry for begin, _, entry in self._waiting if begin >= end]
