"""Changes of one request to what its reader gets: text, stop strings, finish. It does not know who computes or reads.

    Change ──► ids ──► Detokenizer ──► StopFinder ──► Update
               │       holds back      holds back
               │       broken chars    what may become a stop
               └──► token_ids, logprobs: at once

Stream and non-stream both come from here; ``assemble`` joins the updates of one answer, so the two cannot differ.
"""

from collections.abc import Iterable, Sequence

from tandem.engine.contract import Update
from tandem.engine.stops import StopFinder
from tandem.engine.text import Text
from tandem.request import Change, Completion, FinishReason, SamplingParams, TokenLogprobs


class OutputStream:
    """One answer in the making.

    prompt_ids  what the answer continues: its last word decides about spaces; stop strings never match in it.
    index       which of the n answers.

    ``stopped`` turns True when a stop string was found; the front end then aborts the request in the engine, and
    changes that were under way already are dropped. ``finished`` is True once the last update has been given.
    """

    def __init__(self, params: SamplingParams, text: Text, prompt_ids: Sequence[int], index: int = 0) -> None:
        self.index = index
        self.finished = False
        self.stopped = False
        self.num_tokens = 0
        self._params = params
        self._eos = text.eos_ids
        self._detokenizer = text.detokenizer(prompt_ids, params.skip_special_tokens)
        self._finder = StopFinder(params.stop, params.include_stop_str_in_output)
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._cached = 0
        self._is_plain = not params.stop and params.prompt_logprobs is None

    def push_token(self, token: int) -> Update | None:
        """As push, of one token and nothing else; most news by far is that, and then takes a third of the time."""
        if not self._is_plain or self.finished:
            return self.push(Change("", (token,)))
        self.num_tokens += 1
        return Update(self.index, self._detokenizer.push(token), [token], cached=self._cached)

    def push(self, change: Change) -> Update | None:
        """What the reader gets of this change; None if nothing, or if the answer has ended already."""
        if self.finished:
            return None
        self._cached = max(self._cached, change.cached)
        self._prompt_logprobs.extend(change.prompt_logprobs or ())
        if not change.tokens and change.finish is None:
            return None
        update = Update(self.index, cached=self._cached)
        if self._prompt_logprobs and self.index == 0:
            update.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        pieces: list[str] = []
        last = len(change.tokens) - 1
        for place, token in enumerate(change.tokens):
            self.num_tokens += 1
            update.token_ids.append(token)
            ends = change.finish == "stop" and place == last
            if not ends or self._is_shown(token):
                pieces.append(self._release(self._detokenizer.push(token)))
            if ends and token in self._params.stop_token_ids:
                update.stop = token
            if self.stopped:
                break
        if change.logprobs is not None:
            update.logprobs = list(change.logprobs[: len(update.token_ids)])
        self._settle(update, pieces, change.finish)
        update.text = "".join(pieces)
        return update

    def _settle(self, update: Update, pieces: list[str], finish: FinishReason | None) -> None:
        """The end, if this is it: by a stop string, or because the engine says so."""
        if finish is not None and not self.stopped:
            pieces.append(self._release(self._detokenizer.flush()))
            if not self.stopped:
                pieces.append(self._finder.flush())
        if self.stopped:
            update.finish, update.stop = "stop", self._finder.match
        else:
            update.finish = finish
        self.finished = update.finish is not None

    def _release(self, text: str) -> str:
        # As with end-of-sequence ids, the first min_tokens tokens cannot end the answer.
        released = self._finder.push(text, may_stop=self.num_tokens > self._params.min_tokens)
        self.stopped = self._finder.match is not None
        return released

    def _is_shown(self, token: int) -> bool:
        """Whether the text of the token that ended the answer belongs to it."""
        if token in self._eos:
            return not self._params.skip_special_tokens
        return self._params.include_stop_str_in_output


def assemble(updates: Iterable[Update]) -> Completion:
    """All updates of one answer, in order, as one completion."""
    completion = Completion(index=0)
    pieces: list[str] = []
    for update in updates:
        completion.index = update.index
        pieces.append(update.text)
        completion.token_ids.extend(update.token_ids)
        if update.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + update.logprobs
        if update.finish is not None:
            completion.finish_reason, completion.stop = update.finish, update.stop
    completion.text = "".join(pieces)
    return completion
