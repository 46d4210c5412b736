"""The runner on a CPU: the step runs in a compute thread, which PyTorch lets work while the loop plans the next one.

It knows plans, rows and slots; it does not know who plans. Everything that a plan does to the rows' state happens on
the compute thread, in order, as on a GPU's compute stream:

    loop's thread     pack 1 → queue │ collect 0 │ pack 2 → queue │ collect 1 │
    compute thread    ███ 0 ███████████████│███ 1 ████████████████████│███ 2 ███
"""

import logging
import queue
import threading
import time
from typing import Any, cast

import torch

from tandem.attention.choice import attention_backend
from tandem.attention.contract import AttentionBackend, KVCache
from tandem.config import Resolved
from tandem.errors import DeviceMemoryError
from tandem.kernels.step import finish
from tandem.layers.linear import linear_scheme
from tandem.models.decoder import Decoder
from tandem.models.registry import build
from tandem.models.spec import ModelSpec
from tandem.plan import StepPlan, StepResult, StepTimes
from tandem.runner.batch import Assembler, Packed, Packer
from tandem.runner.contract import RunnerFacts, Ticket
from tandem.runner.outcome import draw, settle
from tandem.runner.rows import DeviceRows
from tandem.sampling.rows import SamplerRows
from tandem.weights.load import load
from tandem.weights.source import ModelSource

log = logging.getLogger("tandem.runner")


class CpuRunner:
    """Runs a decoder in a thread of its own.

    model       loaded weights.             cache       the KV cache of all layers.
    num_rows    most requests in a step.    max_length  most positions of a request.
    depth       steps in flight, 1..4.      threads     CPU threads of one operation.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, backend: AttentionBackend, *, num_rows: int, max_length: int,
        depth: int = 2, threads: int | None = None, seed: int = 0, num_tokens: int | None = None,
        phases_s: dict[str, float] | None = None, notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.depth = depth
        self.facts = RunnerFacts(
            num_blocks=cache.keys[0].shape[0], num_rows=num_rows, num_logits=model.spec.num_logits,
            max_length=max_length, phases_s=phases_s or {}, notes=notes,
        )  # fmt: skip
        max_blocks = -(-max_length // cache.block_size) + 1
        self._model, self._cache, self._backend, self._threads = model, cache, backend, threads
        self._packer = Packer(num_rows, max_blocks)
        self._rows = DeviceRows.allocate(num_rows, max_blocks, torch.device("cpu"))
        self._assembler = Assembler(self._rows, cache.block_size)
        self._samplers = SamplerRows(num_rows, model.spec.num_logits, "cpu", seed, num_tokens=num_tokens)
        self._home_DR = torch.zeros((1, num_rows), dtype=torch.int64)
        self._turn_1 = torch.zeros(1, dtype=torch.int32)
        self._todo: queue.SimpleQueue[tuple[Packed, StepTimes] | None] = queue.SimpleQueue()
        self._home: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._num_submitted = self._num_collected = 0
        self._recipe: tuple[str | None, torch.dtype, int, bool] = (None, cache.keys[0].dtype, seed, False)
        self._thread = threading.Thread(target=self._work, name="tandem-compute", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls, spec: ModelSpec, source: ModelSource, resolved: Resolved, *, num_tokens: int | None = None
    ) -> "CpuRunner":
        """Load the weights, allocate the cache, start the thread. Raises WeightsError, DeviceMemoryError.

        num_tokens  ids the tokenizer knows; None: all rows of the output matrix.
        """
        settings = resolved.settings
        torch.set_num_threads(settings.threads or 1)
        dtype = getattr(torch, settings.dtype or "float32")
        began_s = time.perf_counter()
        recipe = (settings.quantize, dtype, settings.seed, settings.deterministic)
        model = _load(spec, source, *recipe)
        loaded_s = time.perf_counter()
        num_blocks = num_blocks_for(spec, settings.kv_cache_memory or 0, settings.block_size, dtype)
        try:
            cache = KVCache.allocate(
                spec.num_layers, num_blocks, settings.block_size, spec.num_kv_heads, spec.head_dim, dtype,
                torch.device("cpu"),
            )  # fmt: skip
        except (RuntimeError, MemoryError) as error:  # what is free was an estimate
            raise DeviceMemoryError(
                f"the machine has no memory for a KV cache of {settings.kv_cache_memory} bytes.",
                hint="lower kv_cache_memory or max_num_seqs.",
            ) from error
        backend = attention_backend(settings.attention, "cpu", deterministic=settings.deterministic)
        runner = cls(
            model, cache, backend, num_rows=settings.max_num_seqs or 1,
            max_length=settings.max_model_len or spec.max_length, depth=settings.depth, threads=settings.threads,
            seed=settings.seed, num_tokens=num_tokens,
            phases_s={"weights": loaded_s - began_s, "cache": time.perf_counter() - loaded_s},
            notes=(f"attention: {backend.name}",),
        )  # fmt: skip
        runner._recipe = recipe
        return runner

    def submit(self, plan: StepPlan) -> Ticket:
        assert self._num_submitted - self._num_collected < self.depth, "more steps in flight than the depth"
        submitted_s = time.perf_counter()
        packed = self._packer.pack(plan)
        self._todo.put((packed, StepTimes(submitted_s=submitted_s, ready_s=time.perf_counter())))
        ticket = Ticket(plan.step, self._num_submitted % self.depth)
        self._num_submitted += 1
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._home.get()
        self._num_collected += 1
        if isinstance(result, BaseException):
            raise result
        assert result.step == ticket.step, f"ticket {ticket.step} is collected when {result.step} is next"
        return result

    def reload(self, source: ModelSource) -> None:
        """Replace the weights. No step may be in flight; what the cache holds is stale then.

        A load that fails changes nothing.
        For the time of loading both sets of weights are in memory.
        """
        assert self._num_submitted == self._num_collected, "weights are replaced while a step is in flight"
        self._model = _load(self._model.spec, source, *self._recipe)

    def close(self) -> None:
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()

    def statistics(self) -> dict[str, Any]:
        return {
            "rows_taken": self._packer.rows.num_taken,
            "in_flight": self._num_submitted - self._num_collected,
            "steps": self._num_collected,
        }

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # OpenMP keeps the number per thread
        with torch.inference_mode():
            while (item := self._todo.get()) is not None:
                try:
                    self._home.put(self._step(*item))
                except BaseException as error:
                    self._home.put(error)

    def _step(self, packed: Packed, times: StepTimes) -> StepResult:
        times.began_s = time.perf_counter()
        plan = packed.plan
        if packed.places_C:
            self._rows.grow(torch.tensor((packed.places_C, packed.blocks_C), dtype=torch.int32))
        if plan.block_copies:
            sources_C, targets_C = torch.tensor(plan.block_copies, dtype=torch.int64).unbind(1)
            self._cache.copy_blocks(sources_C, targets_C)
        for row in plan.departures:
            self._samplers.depart(row)
        for arrival in plan.arrivals:
            self._samplers.arrive(arrival)
        batch = self._assembler.assemble(packed)
        hidden_RE = self._model(batch, self._cache, self._backend)
        drawn = draw(packed, hidden_RE, self._model.logits, self._samplers)
        tokens: list[int] = []
        if drawn.tokens_R is not None:
            count = packed.num_samples
            rows_R = self._assembler.sampled_rows_R
            finish(drawn.tokens_R, hidden_RE[:count], rows_R, self._rows.last_R, self._home_DR, self._turn_1)
            tokens = self._home_DR[0, :count].tolist()
        times.computed_s = time.perf_counter()
        result = settle(packed, tokens, drawn)
        times.home_s = time.perf_counter()
        result.times = times
        return result


def num_blocks_for(spec: ModelSpec, memory_bytes: int, block_size: int, dtype: torch.dtype) -> int:
    """Blocks that fit into memory_bytes: memory // (block_size · 2 · layers · KV heads · head dim · bytes).

    Raises DeviceMemoryError if not even one block fits.
    """
    block_bytes = spec.kv_bytes_per_token(dtype.itemsize) * block_size
    if memory_bytes < block_bytes:
        raise DeviceMemoryError(
            f"the KV cache may take {memory_bytes} bytes; one block of {block_size} tokens takes {block_bytes}.",
            hint=f"raise kv_cache_memory to at least {block_bytes}.",
        )
    return memory_bytes // block_bytes


def _load(
    spec: ModelSpec, source: ModelSource, quantize: str | None, dtype: torch.dtype, seed: int, deterministic: bool
) -> Decoder:  # fmt: skip
    device = torch.device("cpu")
    model = build(spec, dtype, device, linear=linear_scheme(quantize, device, deterministic))
    load(cast(Any, model), source, seed=seed)
    return model
