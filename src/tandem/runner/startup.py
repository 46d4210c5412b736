"""From a model's source to a GPU runner: load, measure, size the cache, capture. It knows settings; not who asks.

kernels are compiled elsewhere ──────────┐
load weights ─► open the libraries ─► wait ─► run the largest step once, measured ─► size the KV cache ─► capture
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

import torch
import torch.nn.functional as F

from tandem.attention.choice import attention_backend
from tandem.attention.contract import AttentionBackend, Batch, KVCache
from tandem.attention.triton import TritonAttention
from tandem.config import Resolved, Settings
from tandem.errors import DeviceMemoryError
from tandem.kernels.attention_library import is_worth_it, whole_prompt_attention
from tandem.kernels.compiling import Compiling
from tandem.layers.linear import RowLinear, linear_scheme
from tandem.models.decoder import Decoder
from tandem.models.registry import build
from tandem.models.spec import ModelSpec
from tandem.runner.cuda import CudaRunner
from tandem.runner.device_sampling import GREEDY, NUMBERS, PLAIN, DeviceSampling
from tandem.runner.graphs import Lanes, buckets_up_to
from tandem.runner.memory import MemoryFacts, cache_blocks, check_weights
from tandem.runner.rows import DeviceRows
from tandem.runner.slots import most_staging_bytes
from tandem.runner.streams import CudaStreams
from tandem.runner.variants import OURS, finish_compiling
from tandem.weights.load import load
from tandem.weights.source import ModelSource

CAPTURE_S = 2.0
GRAPH_BYTES = 2 << 20


@torch.inference_mode()
def start(
    spec: ModelSpec, source: ModelSource, resolved: Resolved, num_tokens: int | None = None,
    compiling: Compiling | None = None,
) -> CudaRunner:  # fmt: skip
    """Build a runner on the current CUDA device. Raises WeightsError, ModelError, DeviceMemoryError.

    compiling   the kernels that start_compiling() was asked for.
    """
    settings = resolved.settings
    device = torch.device("cuda", torch.cuda.current_device())
    streams, phases = CudaStreams(device), _Phases(device)
    dtype = getattr(torch, settings.dtype or "bfloat16")
    has_asked_cache = resolved.reasons.get("kv_cache_memory") == "asked"
    with streams.on("compute"):
        model = _load(spec, source, settings, dtype, device, has_asked_cache)
        phases.end("weights")
        chosen = settings.attention if resolved.reasons.get("attention") == "asked" else None
        backend = attention_backend(
            chosen, "cuda", deterministic=settings.deterministic, dtype=dtype, head_dim=spec.head_dim
        )
        open_libraries(model, settings, dtype)
        phases.end("libraries")
        finish_compiling(compiling, spec, settings, num_tokens, device)
        phases.end("compiling")
        facts = measure(model, backend, settings, dtype, num_tokens)
        phases.end("measuring")
        cache = _cache(spec, settings, facts, dtype, device, has_asked_cache)
        phases.end("cache")
        num_rows = settings.max_num_seqs or 1
        with _no_room_for_rows(settings, facts):
            runner = CudaRunner(
                model, cache, backend, streams, num_rows=num_rows, max_length=settings.max_model_len or spec.max_length,
                max_tokens=settings.max_batch_tokens or num_rows, depth=settings.depth,
                uses_graphs=settings.cuda_graphs, seed=settings.seed, num_tokens=num_tokens, phases_s=phases.seconds,
            )  # fmt: skip
    if settings.cuda_graphs:
        with _no_room_for_rows(settings, facts):
            runner.warm_up((GREEDY, PLAIN), CAPTURE_S)
        phases.end("graphs")
        torch.cuda.empty_cache()  # what the first runs of the captured steps took
    statistics = runner.statistics()
    runner.add_notes(
        f"attention: {backend.name}",
        f"memory: weights {_mib(facts.weights)}, largest step {_mib(facts.activations)}, "
        f"KV cache {_mib(cache.num_bytes)}",
        f"graphs: {statistics['graphs']} captured, {_mib(statistics['graph_pool_bytes'])} in one pool for all slots",
    )
    return runner


class _Phases:
    """Seconds that each phase of the start took, on the device, too."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._moment_s = device, time.perf_counter()

    def end(self, name: str) -> None:
        torch.cuda.synchronize(self._device)
        now_s = time.perf_counter()
        self.seconds[name], self._moment_s = now_s - self._moment_s, now_s


def _cache(
    spec: ModelSpec, settings: Settings, facts: MemoryFacts, dtype: torch.dtype, device: torch.device,
    has_asked_cache: bool,
) -> KVCache:  # fmt: skip
    """The KV cache: what was asked for, or all that is left."""
    block_bytes = spec.kv_bytes_per_token(dtype.itemsize) * settings.block_size
    asked, least = settings.kv_cache_memory if has_asked_cache else None, max(16, settings.max_num_seqs or 1)
    num_blocks = cache_blocks(facts, settings.gpu_memory_utilization, block_bytes, least, asked)
    with _told(
        f"a KV cache of {_mib(num_blocks * block_bytes)} does not fit, although so much was free.",
        "lower gpu_memory_utilization or kv_cache_memory, or free the device of other processes.",
    ):
        return KVCache.allocate(
            spec.num_layers, num_blocks, settings.block_size, spec.num_kv_heads, spec.head_dim, dtype, device
        )


@contextmanager
def _told(what: str, hint: str) -> Iterator[None]:
    """Memory that runs out within, the device's or the host's pinned one, becomes a DeviceMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(what, hint=hint) from error


def _no_room_for_rows(settings: Settings, facts: MemoryFacts) -> AbstractContextManager[None]:
    return _told(
        f"the state of {settings.max_num_seqs or 1} rows at depth {settings.depth}, {_mib(facts.state)} on the device "
        "and pinned memory of the host, does not fit beside the KV cache.",
        "lower max_num_seqs, max_model_len or gpu_memory_utilization.",
    )


def state_bytes(settings: Settings, spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a runner takes on the device beside weights, cache and steps: tables of rows and lanes, staging memory."""
    num_rows, max_length = settings.max_num_seqs or 1, settings.max_model_len or spec.max_length
    max_blocks, nowhere = -(-max_length // settings.block_size) + 1, torch.device("meta")
    num_lanes = buckets_up_to(num_rows)[-1]
    lanes = Lanes.allocate(num_lanes, max_blocks, spec.hidden_size, dtype, nowhere)
    rows = DeviceRows.allocate(num_rows, max_blocks, nowhere)
    names = set(Lanes.__slots__) - {"numbers", "rows_S", "starts_S", "order_S"}  # the last three are parts of wide_4S
    tensors: list[torch.Tensor] = [rows.tables_RB, rows.last_R, *(getattr(lanes, name) for name in names)]
    staging = most_staging_bytes(num_rows, settings.max_batch_tokens or num_rows, max_blocks)
    sampler = num_rows * 8 * (6 + 3)  # its numbers and integers
    return sum(tensor.nbytes for tensor in tensors) + settings.depth * (staging + 8 * num_lanes) + sampler


def _load(
    spec: ModelSpec, source: ModelSource, settings: Settings, dtype: torch.dtype, device: torch.device,
    has_asked_cache: bool,
) -> Decoder:  # fmt: skip
    """Build the model and load its weights; has_asked_cache: the KV cache's size was asked for, so no share holds."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    weights = spec.num_parameters * dtype.itemsize
    known = MemoryFacts(total, total - free - held, weights, activations=0, graphs=0, max_tokens=1)
    check_weights(known, 1.0 if has_asked_cache else settings.gpu_memory_utilization)
    with _told(
        f"loading the weights takes more than {_mib(weights)}; the device had {_mib(free)} of {_mib(total)} free.",
        "take a smaller model, a dtype of fewer bytes, or free the device of other processes.",
    ):
        scheme = linear_scheme(settings.quantize, device, settings.deterministic)
        model = build(spec, dtype, device, linear=scheme, max_length=settings.max_model_len)
        load(cast(Any, model), source, seed=settings.seed)
    return model


def open_libraries(model: Decoder, settings: Settings, dtype: torch.dtype) -> None:
    """Have the vendors' libraries do once what the largest step asks of them, while kernels are compiled elsewhere.

    Their first calls load code and make plans. A step too large for the memory is measure()'s to tell of.
    """
    spec, device = model.spec, model.embedding_VE.device
    tokens = settings.max_batch_tokens or 1
    longest = min(settings.max_model_len or spec.max_length, tokens)
    with suppress(torch.OutOfMemoryError):
        for layer in model.blocks[0].modules():
            if isinstance(layer, RowLinear):
                F.linear(torch.zeros((tokens, layer.in_size), dtype=dtype, device=device), layer.weight_OI)
        hidden_RE = torch.zeros((settings.max_num_seqs or 1, spec.hidden_size), dtype=dtype, device=device)
        F.linear(hidden_RE, model.embedding_VE)
        if settings.attention in OURS and is_worth_it(0, longest, dtype, spec.head_dim):
            kv = torch.zeros((1, settings.block_size, spec.num_kv_heads, spec.head_dim), dtype=dtype, device=device)
            queries = torch.zeros((longest, spec.num_heads, spec.head_dim), dtype=dtype, device=device)
            table_B = torch.zeros(-(-longest // settings.block_size), dtype=torch.int32, device=device)
            whole_prompt_attention(queries, kv, kv, table_B, 0, longest, spec.attention_scale)


def measure(
    model: Decoder, backend: AttentionBackend, settings: Settings, dtype: torch.dtype, num_tokens: int | None
) -> MemoryFacts:
    """Run the largest step once on made-up tokens and see what it takes. Raises DeviceMemoryError."""
    device, spec = model.embedding_VE.device, model.spec
    max_tokens, num_rows = settings.max_batch_tokens or 1, settings.max_num_seqs or 1
    with _told(
        f"attention's scratch memory for {num_rows} rows does not fit beside the weights.",
        "lower max_num_seqs or max_model_len, or take a smaller model or a dtype of fewer bytes.",
    ):
        sampling = DeviceSampling(1, spec.num_logits, device, 0, num_tokens)
        cache = KVCache.allocate(
            spec.num_layers, 2, settings.block_size, spec.num_kv_heads, spec.head_dim, dtype, device
        )  # fmt: skip
        scratch_bytes = _reserve(backend, settings, spec, dtype)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with _told(
        f"a step of {max_tokens} tokens does not fit beside the weights.",
        f"lower max_batch_tokens, say to {max(max_tokens // 4, 1)}.",
    ):
        hidden_RE = model(_largest_batch(spec, settings, max_tokens, num_rows, device), cache, backend)
        step = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        logits_RV = model.logits(hidden_RE)
        numbers = {name: torch.ones(num_rows, dtype=kind, device=device) for name, kind in NUMBERS.items()}
        sampling.choose(logits_RV, numbers, torch.zeros(num_rows, dtype=torch.int64, device=device))
        copies = [torch.empty_like(logits_RV) for _ in range(3)]  # what penalties and masks take
        sampled = torch.cuda.max_memory_allocated(device) - before
        del copies, logits_RV, hidden_RE, numbers
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    num_graphs = 2 * len(buckets_up_to(num_rows)) if settings.cuda_graphs else 0
    return MemoryFacts(
        total=total,
        outside=total - free - torch.cuda.memory_reserved(device),
        weights=before - cache.num_bytes - scratch_bytes,
        activations=max(step, sampled) + scratch_bytes,
        graphs=(sampled + num_graphs * GRAPH_BYTES) if num_graphs else 0,
        max_tokens=max_tokens,
        state=state_bytes(settings, spec, dtype),
    )


def _reserve(backend: AttentionBackend, settings: Settings, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Have the backend take what its decode steps need beside a step's own memory. Returns the bytes."""
    if not isinstance(backend, TritonAttention):
        return 0
    num_rows, max_length = settings.max_num_seqs or 1, settings.max_model_len or spec.max_length
    return backend.reserve(num_rows, max_length, spec.attention_shape(0), dtype.itemsize)


def _largest_batch(spec: ModelSpec, settings: Settings, max_tokens: int, num_rows: int, device: torch.device) -> Batch:
    """max_tokens prompt tokens in spans as long as a request may be; all of them share the first block."""
    longest = min(settings.max_model_len or spec.max_length, max_tokens)
    lengths = [longest] * (max_tokens // longest) + ([max_tokens % longest] if max_tokens % longest else [])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    width = -(-longest // settings.block_size)
    return Batch(
        ids_T=torch.zeros(max_tokens, dtype=torch.int64, device=device),
        positions_T=positions.to(device),
        slots_T=(torch.arange(max_tokens) % settings.block_size).to(device),
        query_starts_S1=starts.to(device, torch.int32),
        lengths_S=torch.tensor(lengths, dtype=torch.int32, device=device),
        tables_SB=torch.zeros((len(lengths), width), dtype=torch.int32, device=device),
        sampled_R=(torch.arange(num_rows) % max_tokens).to(device),
        num_decodes=0,
        max_query=longest,
        max_length=longest,
        host_spans=[(0, length) for length in lengths],
    )


def reload(model: Decoder, source: ModelSource) -> None:
    """Replace a model's weights where they are, since graphs know their addresses.

    Raises what loading raises, and puts the old ones, kept in host memory meanwhile, back.
    """
    kept = [parameter.data.cpu() for parameter in model.parameters()]
    try:
        load(cast(Any, model), source)
    except BaseException:
        for parameter, old in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(old)
        raise


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
