"""Which kernels a model's steps need, told on tensors without memory: no device is touched, nothing is computed.

It knows the shapes of steps; it does not know how kernels are compiled. Within kernels.launch.planning and a way to
compile, each kernel that list_kernels() comes across is asked for once:

    prompts of 1 … max_batch_tokens tokens, greedy and sampled     one behind a decode     decode steps of all sizes
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch

from tandem.attention.contract import AttentionBackend, KVCache
from tandem.attention.triton import TritonAttention
from tandem.config import Settings
from tandem.kernels.compiling import Compiling, compile_in_processes
from tandem.kernels.grouped import FEW_ROWS
from tandem.kernels.launch import compile_ahead, planning, target_of
from tandem.layers.linear import linear_scheme
from tandem.layers.mixture import Mixture
from tandem.models.decoder import Decoder
from tandem.models.registry import build
from tandem.models.spec import ModelSpec
from tandem.plan import Arrival, Span, StepPlan
from tandem.request import SamplingParams
from tandem.runner.cuda import CudaRunner
from tandem.runner.device_sampling import GREEDY, NUMBERS, PLAIN, DeviceSampling
from tandem.runner.streams import EagerStreams, Streams

log = logging.getLogger("tandem.runner")

OURS = (None, "triton", "flashinfer")  # attention backends that launch our kernels
MOST_S = 60.0
PROMPTS = (1, 40, 100, 200)  # tokens of prompts that are attended and multiplied by other kernels than the largest step
LONGEST = 1024  # above, the vendor's library attends to prompts, and acting it out takes seconds
WAYS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))


COMPILED_FOR = (
    "attention", "block_size", "cuda_graphs", "depth", "deterministic", "dtype", "max_batch_tokens", "max_model_len",
    "max_num_seqs", "quantize",
)  # fmt: skip


def start_compiling(spec: ModelSpec, settings: Settings, num_tokens: int | None = None) -> Compiling:
    """Have the kernels compiled by processes of their own. Settings are resolved; CUDA is not initialised yet."""
    if settings.attention not in OURS:
        return Compiling()
    wanted = repr((spec, [getattr(settings, name) for name in COMPILED_FOR], num_tokens))
    return compile_in_processes(lambda: list_kernels(spec, settings, num_tokens), wanted)


def finish_compiling(
    compiling: Compiling | None, spec: ModelSpec, settings: Settings, num_tokens: int | None, device: torch.device
) -> None:
    """Wait until kernels are compiled, or else compile them here, side by side in threads.

    What neither can do is left to the first launches.
    """
    if settings.attention not in OURS or (compiling is not None and compiling.join(MOST_S)):
        return
    target = target_of(device)
    assert target is not None
    try:
        with planning(target), compile_ahead():
            list_kernels(spec, settings, num_tokens)
    except Exception:  # nothing is lost but time
        log.info("kernels are compiled as they are needed", exc_info=True)


@torch.inference_mode()
def list_kernels(spec: ModelSpec, settings: Settings, num_tokens: int | None = None) -> None:
    """Act out the steps that a runner with these settings may be asked for; kernels are launched on "meta" tensors."""
    place = torch.device("meta")
    dtype = getattr(torch, settings.dtype or "bfloat16")
    scheme = linear_scheme(settings.quantize, place, settings.deterministic)
    model = build(_few_layers(spec), dtype, place, linear=scheme, max_length=settings.max_model_len)
    backend = TritonAttention(place, settings.deterministic)
    most, num_rows = settings.max_batch_tokens or 1, settings.max_num_seqs or 1
    _runner(model, backend, settings, dtype, num_tokens).list_decodes((GREEDY, PLAIN))  # first: they take longest
    longest = min(settings.max_model_len or spec.max_length, most, LONGEST)
    _list_mixtures(model, most)
    for lengths in ([longest] * min(most // longest, num_rows), *([min(count, longest)] for count in PROMPTS)):
        for params in WAYS:
            runner = _runner(model, backend, settings, dtype, num_tokens)
            runner.submit(_prompts(0, lengths, params))
    numbers = {name: torch.empty(num_rows, dtype=kind, device=place) for name, kind in NUMBERS.items()}
    logits_RV = torch.empty((num_rows, spec.num_logits), dtype=torch.float32, device=place)  # of the general way
    sampling = DeviceSampling(1, spec.num_logits, place, 0, num_tokens)
    sampling.choose(logits_RV, numbers, torch.empty(num_rows, dtype=torch.int64, device=place))
    if settings.depth > 1 and num_rows > 1:
        runner = _runner(model, backend, settings, dtype, num_tokens)
        runner.submit(_prompts(0, [1], WAYS[0]))
        runner.submit(_prompts(1, [min(40, longest, most - 1)], WAYS[0], decode=True))


def _list_mixtures(model: Decoder, most: int) -> None:
    """Experts' products of few rows each, of more, and of as many tokens as a step may have, whatever its prompts."""
    for layer in (block.feed_forward for block in model.blocks):
        if isinstance(layer, Mixture):
            more = FEW_ROWS * layer.num_experts // layer.num_chosen + 1
            for count in (1, min(more, most), most):
                layer(model.embedding_VE.new_empty((count, model.spec.hidden_size)))


def _few_layers(spec: ModelSpec) -> ModelSpec:
    """The same with the first layers only: one of every kind, a second one, and a last one,
    of the last one's kind, where tokens are fewer."""
    mixtures = spec.mixture.layers if spec.mixture is not None else frozenset()
    kinds = [(layer in spec.sliding, layer in mixtures) for layer in range(spec.num_layers)]
    first_of_each = (kinds.index(kind) for kind in set(kinds))
    least = min(spec.num_layers, max(1, *first_of_each) + 2)
    most = next(count for count in range(least, spec.num_layers + 1) if kinds[count - 1] == kinds[-1])
    return dataclasses.replace(spec, num_layers=most)


def _runner(
    model: Decoder, backend: AttentionBackend, settings: Settings, dtype: torch.dtype, num_tokens: int | None
) -> CudaRunner:
    spec, place = model.spec, torch.device("meta")
    cache = KVCache.allocate(spec.num_layers, 2, settings.block_size, spec.num_kv_heads, spec.head_dim, dtype, place)
    num_rows, streams = settings.max_num_seqs or 1, cast(Streams, EagerStreams(place))
    return CudaRunner(
        model, cache, backend, streams, num_rows=num_rows,
        max_length=settings.max_model_len or spec.max_length, max_tokens=settings.max_batch_tokens or num_rows,
        depth=settings.depth, uses_graphs=settings.cuda_graphs, num_tokens=num_tokens,
    )  # fmt: skip


def _prompts(step: int, lengths: Sequence[int], params: SamplingParams, decode: bool = False) -> StepPlan:
    """A step of whole prompts. decode: behind the second token of the request in row 0, whose prompt had one."""
    first: list[Any] = [Span("0", 0, 1, 1, (), True)] if decode else []
    rows = range(len(first), len(first) + len(lengths))
    return StepPlan(
        step,
        [*first, *(Span(str(row), row, 0, length, (0,), True) for row, length in zip(rows, lengths, strict=True))],
        [Arrival(str(row), row, [0] * length, length, params) for row, length in zip(rows, lengths, strict=True)],
        num_decodes=len(first),
    )
