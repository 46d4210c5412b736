"""How many log-probabilities a request may hold at once, and as much of max_tokens as there is room for.

It knows what an answer shows; it does not know who else holds some. In memory each takes some 110 bytes.
"""

import dataclasses
from collections.abc import Sequence

from tandem.errors import RequestError
from tandem.request import SamplingParams
from tandem.serve.accept import Limits
from tandem.serve.reply import Show

# Of each answer of a stream, that wait for its reader: 3,120 tokens with 20 alternatives each.
MAX_BEHIND = 1 << 16


def fit_logprobs(
    params: SamplingParams, show: Show, lengths: Sequence[int], max_length: int, limits: Limits, *, held: bool,
    echo: bool,
) -> tuple[SamplingParams, int]:  # fmt: skip
    """The parameters, and how many log-probabilities may be held at once for the request.

    lengths   of its prompts.      held   the answer is held until its end; else what its reader leaves waiting is.
    Without max_tokens a held answer takes what is left of the context, or as much of it as may be shown.
    Raises RequestError if a held one may show too many.
    """
    if not (show.logprobs or show.prompt_logprobs):
        return params, 0
    of_new = 1 + (params.logprobs or 0) if show.logprobs else 0
    of_prompt = (1 + (params.prompt_logprobs or 0)) * (show.prompt_logprobs + (echo and show.logprobs))
    num_prompt, num_answers = params.n * sum(lengths) * of_prompt, params.n * len(lengths)
    most = params.max_tokens
    if not held:
        longest = max_length - min(lengths)
        return params, num_answers * min(MAX_BEHIND, of_new * (longest if most is None else min(most, longest)))
    if most is None and of_new:
        room = (limits.max_answer_logprobs - num_prompt) // (num_answers * of_new)
        most = max(1, min(room, max_length - min(lengths)))
        if most < max_length - max(lengths):
            params = dataclasses.replace(params, max_tokens=most)
    num = num_prompt + num_answers * (most or 0) * of_new
    if num > limits.max_answer_logprobs:
        raise RequestError(
            f"the answer may hold {num} log-probabilities; the limit is {limits.max_answer_logprobs}.",
            param="logprobs" if show.logprobs else "prompt_logprobs",
            hint="ask for fewer tokens, fewer answers, or fewer alternatives to a token, or for a stream.",
        )
    return params, num


def tokens_behind(params: SamplingParams) -> int | None:
    """How many tokens with log-probabilities may wait for a stream's reader, of each answer; None: it shows none."""
    return None if params.logprobs is None else MAX_BEHIND // (1 + params.logprobs)
