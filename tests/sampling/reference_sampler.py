"""A slow sampler, one row at a time in float64, straight from the definitions: the twin of tandem.sampling.sample."""

import numpy as np

from tandem.request import SamplingParams


def processed(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Bias and penalties, by loops over ids."""
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p."""
    if params.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass = p[kept].sum()
    if params.top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(p[kept])[:-1]))
        kept = kept[before < params.top_p * mass]
    keep = np.zeros(len(p), dtype=bool)
    keep[kept] = True
    keep &= p >= params.min_p * p.max()
    p = np.where(keep, p, 0.0)
    return p / p.sum()
