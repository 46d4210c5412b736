"""What a step's result means for its requests: tokens are kept, requests end, news is written. It plans nothing."""

from collections.abc import Iterator, Sequence
from itertools import compress

from tandem.plan import Changes, StepResult
from tandem.request import Change, FinishReason, TokenLogprobs
from tandem.schedule.draft import Flight
from tandem.schedule.progress import Progress, Status
from tandem.schedule.running import Running


def settle(running: Running, flight: Flight, result: StepResult) -> Changes:
    """Hand the result out. One change a request that has news; ghosts have none."""
    if result.failed or result.logprobs or result.prompt_logprobs or result.counts is not None:
        return Changes((), (), _settle_with_extras(running, flight, result))
    crew, others, num_crew = flight.crew, flight.sampling_others, len(flight.crew.owners)
    tokens, behind = result.tokens[:num_crew], result.tokens[num_crew:]
    requests, known = crew.requests, crew.tokens
    careful = list(zip(others, behind, strict=True))
    plain = [progress.plain for progress in crew.owners]
    if not crew.stops.isdisjoint(tokens):
        said = zip(crew.owners, tokens, plain, strict=True)
        plain = [is_plain and token not in progress.stops for progress, token, is_plain in said]
    if False in plain:
        said = zip(crew.owners, tokens, plain, strict=True)
        careful = [(progress, token) for progress, token, is_plain in said if not is_plain] + careful
        requests, known = list(compress(requests, plain)), list(compress(known, plain))
        tokens = list(compress(tokens, plain))
    for of_one, token in zip(known, tokens, strict=True):
        of_one.append(token)
    changes = [_take(running, progress, token, None, None) for progress, token in careful]
    return Changes(requests, tokens, [change for change in changes if change is not None])


def _settle_with_extras(running: Running, flight: Flight, result: StepResult) -> list[Change]:
    changes = list(_fail(running, flight, result.failed))
    owners = flight.owners
    prompts: dict[int, Sequence[TokenLogprobs]] = {}
    for index, entries in result.prompt_logprobs.items():
        progress = owners[index]
        if progress.status is not Status.ENDED and progress.wants_prompt_logprobs:
            prompts[index] = _prompt_entries(progress, flight.spans[index].start, entries)
    tokens = iter(result.tokens)
    for i, index in enumerate(flight.indices):
        progress = owners[index]
        if result.counts is not None and result.counts[i] != 1:
            assert result.counts[i] == 0 and progress.status is Status.ENDED, "a row brought home other than one token"
            continue
        change = _take(running, progress, next(tokens), result.logprobs.get(index), prompts.pop(index, None))
        if change is not None:
            changes.append(change)
    changes += [_speak(owners[index], prompt_logprobs=entries) for index, entries in prompts.items()]
    return changes


def _fail(running: Running, flight: Flight, failed: dict[str, str]) -> Iterator[Change]:
    if failed:
        for progress in flight.owners:
            if progress.id in failed and progress.status is not Status.ENDED:
                running.end(progress, forget=True)
                yield _speak(progress, finish="error", error=failed[progress.id])


def _take(
    running: Running,
    progress: Progress,
    token: int,
    logprobs: Sequence[TokenLogprobs] | None,
    prompt_logprobs: Sequence[TokenLogprobs] | None,
) -> Change | None:
    """A token that may be the first, the last, or bound by a grammar."""
    if progress.status is Status.ENDED:
        return None
    tokens = progress.tokens
    tokens.append(token)
    if progress.error is None and progress.mask is not None:
        try:
            progress.mask.accept((token,))
        except Exception as error:
            progress.fail(error)
    if progress.error is not None:
        running.end(progress)
        return _speak(progress, finish="error", error=progress.error, code=progress.code)
    params = progress.request.params
    finish: FinishReason | None = None
    if token in progress.stops and len(tokens) - progress.prompt_length > params.min_tokens:
        finish = "stop"
    elif progress.mask is not None and token in progress.request.eos:
        finish = "stop"  # its grammar is at its end, whatever min_tokens and ignore_eos say: nothing may come behind it
    elif len(tokens) >= progress.limit:
        finish = "length"
    if progress.wants_prompt_logprobs:
        prompt_logprobs = _prompt_entries(progress, 0, ())
    if finish is not None:
        running.end(progress)
    else:
        progress.plain = progress.mask is None and params.logprobs is None and progress.status is not Status.ENDING
    return _speak(progress, (token,), finish, logprobs, prompt_logprobs)


def _prompt_entries(progress: Progress, start: int, entries: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
    """Entries for prompt positions that were not sent yet; entries begin at position start+1."""
    news: list[TokenLogprobs] = []
    if progress.prompt_sent == 0:
        news.append(TokenLogprobs(progress.request.prompt[0], None, 0, ()))
        progress.prompt_sent = 1
    fresh = entries[progress.prompt_sent - start - 1 : progress.prompt_length - start - 1]
    progress.prompt_sent += len(fresh)
    return [*news, *fresh]


def _speak(
    progress: Progress,
    tokens: Sequence[int] = (),
    finish: FinishReason | None = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
    prompt_logprobs: Sequence[TokenLogprobs] | None = None,
    error: str | None = None,
    code: str | None = None,
) -> Change:
    cached = 0 if progress.spoke else max(progress.cached, 0)
    progress.spoke = True
    return Change(progress.id, tokens, finish, logprobs, prompt_logprobs, error, cached, code)
