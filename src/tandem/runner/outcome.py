"""From hidden states to what goes home: tokens, log-probabilities, rows that failed. It knows no streams.

draw(…)     starts the arithmetic where the step runs, and reads nothing back
settle(…)   makes the StepResult once everything is home
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.plan import StepResult
from tandem.request import TokenLogprobs
from tandem.runner.batch import Packed
from tandem.sampling.logprobs import LogprobRows, prompt_logprobs
from tandem.sampling.rows import SamplerRows
from tandem.sampling.sample import sample

NOT_FINITE = "the model's output is not finite (NaN or infinity) for this request."


@dataclass(slots=True)
class Drawn:
    """Device tensors of one step.

    tokens_R   sampled ids, one for each span that samples; None: none does.
    wanted     for each row of logprobs: (index of the span, number of alternatives).
    prompts    (index of the span, number of alternatives, rows) of each stretch of prompt logprobs.
    keep_alive what copies on another stream still read.
    """

    tokens_R: Tensor | None
    wanted: list[tuple[int, int]] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    prompts: list[tuple[int, int, LogprobRows]] = field(default_factory=list)
    keep_alive: list[LogprobRows] = field(default_factory=list)


def draw(
    packed: Packed, hidden_RE: Tensor, logits_of: Callable[[Tensor], Tensor], rows: SamplerRows,
    *, rows_R: Tensor | None = None,
) -> Drawn:  # fmt: skip
    """Sample, and compute the log-probabilities that rows asked for.

    hidden_RE  final hidden states: first of the spans that sample, then of prompt stretches.
    rows_R     state row of each sampled token on the device, if it is there already.
    """
    drawn = Drawn(None)
    sampling = packed.sampling_spans
    if sampling:
        spans = [span for span in packed.plan.spans if span.samples]
        row_ids, positions = [span.row for span in spans], [span.start + span.length for span in spans]
        logits_RV = logits_of(hidden_RE[: len(sampling)])
        sampled = sample(logits_RV, rows, row_ids, positions, packed.plan.masks, rows_R=rows_R)
        drawn.tokens_R = sampled.ids_R
        tops = [rows.facts[row].logprobs for row in row_ids]
        places = [place for place, top in enumerate(tops) if top is not None]
        if places:
            drawn.wanted = [(sampling[place], tops[place] or 0) for place in places]
            drawn.logprobs = sampled.logprobs(places, max(top for _, top in drawn.wanted))
    draw_prompts(packed, hidden_RE, logits_of, rows, drawn)
    return drawn


def draw_prompts(
    packed: Packed, hidden_RE: Tensor, logits_of: Callable[[Tensor], Tensor], rows: SamplerRows, drawn: Drawn
) -> None:
    """The prompt log-probabilities of a step, a few positions at a time."""
    for stretch in packed.stretches:
        targets_T = rows.upload(stretch.targets.tolist(), torch.int64)
        hidden_TE = hidden_RE[stretch.first : stretch.first + stretch.num_positions]
        found = prompt_logprobs(hidden_TE, logits_of, targets_T, stretch.top)
        drawn.prompts.append((stretch.span, stretch.top, found))


def settle(packed: Packed, tokens: Sequence[int], drawn: Drawn) -> StepResult:
    """The result of a step whose tensors are all home.

    tokens  one a sampling span; -1: that row's output is not finite, and the row fails alone.
    """
    spans = packed.plan.spans
    result = StepResult(packed.plan.step, tokens, failed=dict(packed.failed))
    if tokens and min(tokens) < 0:
        for index, token in zip(packed.sampling_spans, tokens, strict=True):
            if token < 0:
                result.failed[spans[index].request] = NOT_FINITE
        result.tokens = [max(token, 0) for token in tokens]
    if drawn.logprobs is not None:
        entries = drawn.logprobs.entries([top for _, top in drawn.wanted])
        result.logprobs = {index: [entry] for (index, _), entry in zip(drawn.wanted, entries, strict=True)}
    prompts: dict[int, Sequence[TokenLogprobs]] = {index: found.entries(top) for index, top, found in drawn.prompts}
    result.prompt_logprobs = prompts
    if packed.dropped:
        _with_dropped(packed, result)
    return result


def _with_dropped(packed: Packed, result: StepResult) -> None:
    """Give the spans that were left out their places back, with a token that nobody reads."""
    kept = [i for i in range(len(packed.plan.spans) + len(packed.dropped)) if i not in packed.dropped]
    of_kept = dict(zip((kept[i] for i in packed.sampling_spans), result.tokens, strict=True))
    of_dropped = {i: 0 for i, span in packed.dropped.items() if span.samples}
    result.tokens = [token for _, token in sorted({**of_kept, **of_dropped}.items())]
    result.logprobs = {kept[i]: entries for i, entries in result.logprobs.items()}
    result.prompt_logprobs = {kept[i]: entries for i, entries in result.prompt_logprobs.items()}
