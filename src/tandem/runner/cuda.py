"""The runner on a GPU: three streams, slots in turn, decode steps as graphs. It knows plans; not who makes them.

    host     submit 1 │ collect 0 │ submit 2 │ collect 1 │           submit never blocks; collect waits for home alone
    in        ▓ 1                  ▓ 2                               what the host knows and the device does not
    compute  ██ 0 ███████████████ 1 ███████████████ 2 ████           rows' state is changed here and nowhere else
    out                          ▓ 0              ▓ 1                tokens

A steady decode step sends nothing: rows, positions and the last tokens are on the device, and the captured step moves
them on by itself. New blocks are left in pinned memory, where a kernel ahead of the step fetches them; whoever joins or
leaves travels as the new list of rows.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.attention.contract import AttentionBackend, AttentionShape, KVCache
from tandem.config import Resolved
from tandem.kernels.attention_form import graph_bound
from tandem.kernels.step import advance, finish, spread
from tandem.plan import StepPlan, StepResult
from tandem.runner.batch import Packed, Packer
from tandem.runner.clock import Timekeeper
from tandem.runner.contract import RunnerFacts, Ticket
from tandem.runner.device_sampling import GENERAL, GREEDY, NUMBERS, DeviceSampling
from tandem.runner.forms import DecodeKeys
from tandem.runner.graphs import LISTED, GraphKey, Graphs, Lanes, is_uneven, span_arrays, span_batch
from tandem.runner.outcome import Drawn, settle
from tandem.runner.rows import DeviceRows
from tandem.runner.slots import Slot, most_logprobs_bytes, most_staging_bytes
from tandem.runner.streams import Streams

log = logging.getLogger("tandem.runner")

OUT_OF_MEMORY = "the device ran out of memory in a step; this request was the newest in it."


class CudaRunner:
    """Runs a decoder on one GPU.

    model       loaded weights.             cache       the KV cache of all layers.
    num_rows    most requests in a step.    max_length  most positions of a request.
    max_tokens  most tokens in a step.      depth       steps in flight, 1..4.
    uses_graphs decode steps are captured; without, they run kernel by kernel, on the same buffers.
    """

    def __init__(
        self, model: Any, cache: KVCache, backend: AttentionBackend, streams: Streams, *, num_rows: int,
        max_length: int, max_tokens: int, depth: int = 2, uses_graphs: bool = True, seed: int = 0,
        num_tokens: int | None = None, phases_s: dict[str, float] | None = None, notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.depth = depth
        self.facts = RunnerFacts(
            num_blocks=cache.keys[0].shape[0], num_rows=num_rows, num_logits=model.spec.num_logits,
            max_length=max_length, phases_s=phases_s or {}, notes=notes,
        )  # fmt: skip
        device, max_blocks = streams.device, -(-max_length // cache.block_size) + 1
        self._model, self._cache, self._backend, self._streams = model, cache, backend, streams
        self._packer = Packer(num_rows, max_blocks)
        self._rows = DeviceRows.allocate(num_rows, max_blocks, device)
        self._sampling = DeviceSampling(num_rows, model.spec.num_logits, device, seed, num_tokens)
        self._uses_graphs = uses_graphs
        dtype = cache.keys[0].dtype
        self._graphs = Graphs(streams, self._decode, num_rows)
        num_lanes = self._graphs.buckets[-1]
        self._lanes = Lanes.allocate(num_lanes, max_blocks, model.spec.hidden_size, dtype, device)
        self._home_DR = torch.zeros((depth, num_lanes), dtype=torch.int64, device=device)
        self._turn_1 = torch.full((1,), depth - 1, dtype=torch.int32, device=device)
        sizes = most_staging_bytes(num_rows, max_tokens, max_blocks), most_logprobs_bytes(num_rows, max_tokens)
        self._slots = [Slot(streams, sizes[0], self._home_DR[turn], turn, sizes[1]) for turn in range(depth)]
        self._times = Timekeeper(streams, depth)
        self._num_submitted = self._num_collected = self._num_failed = 0
        self._num_lanes_run = self._num_lanes_padded = 0
        self._path, self._is_uneven = GREEDY, False
        self._decode_keys = DecodeKeys(backend, cache.keys[0], _shapes(model.spec))
        streams.settle()  # weights, cache and all of the above may come from another stream than steps run on

    @classmethod
    def create(
        cls, spec: Any, source: Any, resolved: Resolved, *, num_tokens: int | None = None, compiling: Any = None
    ) -> "CudaRunner":
        """Load weights, size the cache, capture graphs. Raises WeightsError, ModelError, DeviceMemoryError."""
        from tandem.runner.startup import start

        return start(spec, source, resolved, num_tokens, compiling)

    def add_notes(self, *notes: str) -> None:
        """Lines for the start banner, known only once the runner stands."""
        self.facts = replace(self.facts, notes=(*self.facts.notes, *notes))

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        assert self._num_submitted - self._num_collected < self.depth, "more steps in flight than the depth"
        slot = self._slots[self._num_submitted % self.depth]
        slot.take(self._times.begin(idle=self._num_submitted == self._num_collected))
        packed = slot.packed = self._packer.pack(plan)
        with self._streams.on("compute"):
            sent = self._bring(self._admit(packed, slot), slot)
            slot.drawn = self._compute(slot.packed, slot, sent)
            self._streams.record(slot.moments.computed, "compute")
            slot.fetch(slot.packed.num_samples, slot.drawn)
        self._num_submitted += 1
        return Ticket(plan.step, slot.index)

    @torch.inference_mode()
    def collect(self, ticket: Ticket) -> StepResult:
        slot = self._slots[ticket.slot]
        packed = slot.packed
        assert slot.busy and packed.plan.step == ticket.step, f"ticket {ticket.step} is not the oldest in flight"
        waited = slot.wait()
        tokens = slot.tokens(packed.num_samples)
        result = settle(packed, tokens, slot.drawn)
        result.times = self._times.end(slot.moments, waited)
        slot.give_back()
        self._num_collected += 1
        return result

    def _admit(self, packed: Packed, slot: Slot) -> Packed:
        """Departures and arrivals, as far as sampling goes; who is lost computes nothing, in later steps either."""
        self._sampling.depart(packed.plan.departures)
        for arrival in packed.plan.arrivals:
            self._sampling.arrive(arrival)
        if self._sampling.lost:
            for span in [span for span in packed.plan.spans if span.row in self._sampling.lost]:
                packed = self._without(span.request, packed, slot)
        return packed

    def _bring(self, packed: Packed, slot: Slot) -> dict[str, Tensor]:
        """Send what is new and change rows, cache and lanes. Without memory the newest request fails, as in compute."""
        while packed.num_spans:
            try:
                sent = self._send(packed, slot)
                if slot.moments.sent:
                    self._streams.wait("compute", slot.moments.ready)
                self._streams.record(slot.moments.began, "compute")
                self._change(packed, sent)
                return sent
            except torch.OutOfMemoryError:
                packed = self._without_newest(packed, slot)
                self._streams.drain()
        # Their rows are not what a step that is planned already takes them for: it would write over others' blocks.
        self._sampling.lost.update(span.row for span in packed.dropped.values())
        self._streams.record(slot.moments.began, "compute")
        return {}

    def _send(self, packed: Packed, slot: Slot) -> dict[str, Tensor]:
        """Send what the host knows and the device does not: nothing in most decode steps, else mostly a few blocks."""
        arrays: dict[str, np.ndarray] = {}
        layout, copies = packed.layout, packed.plan.block_copies
        if packed.places_C:
            if layout is None and not copies:
                return {"growth": slot.post(packed.places_C, packed.blocks_C)}
            arrays["growth"] = np.array((packed.places_C, packed.blocks_C), dtype=np.int32)
        if copies:
            arrays["copies"] = np.array(copies, dtype=np.int64)
        if layout is not None:
            self._path = self._sampling.path(layout.rows_R, bool(packed.plan.masks))
            numbers = None if self._path == GREEDY else self._sampling.arrays(layout.rows_R)
            if packed.decode:
                self._is_uneven = is_uneven(layout.lengths_S)
                arrays |= Lanes.arrays(self._size_of(packed), layout.rows_S, layout.starts_S, numbers)
            else:
                arrays |= span_arrays(layout, numbers)
        return slot.send(arrays) if arrays else {}

    def _size_of(self, packed: Packed) -> int:
        return self._graphs.bucket_of(packed.num_spans) if self._uses_graphs else packed.num_spans

    def _change(self, packed: Packed, sent: Mapping[str, Tensor]) -> None:
        """Bring rows, cache and lanes up to the plan, on the compute stream."""
        if packed.places_C:
            self._rows.grow(sent["growth"])
        if packed.plan.block_copies:
            self._cache.copy_blocks(sent["copies"][:, 0], sent["copies"][:, 1])
        if packed.decode and packed.layout is not None:
            self._lanes.take(sent)

    def _compute(self, packed: Packed, slot: Slot, sent: Mapping[str, Tensor]) -> Drawn:
        """Forward and sampling. If memory runs out, the newest request of the step fails and the rest goes on."""
        fails = False
        while True:
            try:
                if fails:
                    sent = self._resend(packed, slot)
                if packed.decode:
                    return self._decode_step(packed)
                return self._spread_step(packed, slot, sent)
            except torch.OutOfMemoryError:
                packed, fails = self._without_newest(packed, slot), True

    def _decode_step(self, packed: Packed) -> Drawn:
        size, num_spans = self._size_of(packed), packed.num_spans
        bound = graph_bound(packed.max_length)
        key = self._decode_keys.key(size, self._path, bound, self._is_uneven)
        if self._uses_graphs:
            self._num_lanes_run += size
            self._num_lanes_padded += size - num_spans
            self._graphs.step(key, bound)
        else:
            self._decode(key, bound)
        if self._path != GENERAL:
            return Drawn(None)
        lanes = self._lanes
        hidden_SE, numbers = lanes.hidden_SE[:num_spans], {n: t[:num_spans] for n, t in lanes.numbers.items()}
        drawn = self._sampling.draw(
            packed, GENERAL, hidden_SE, self._model.logits, numbers, lanes.starts_S[:num_spans]
        )  # fmt: skip
        self._finish(drawn, hidden_SE, lanes.rows_S[:num_spans])
        return drawn

    def _decode(self, key: GraphKey, max_length: int) -> None:
        """One decode step over the lanes, from state on the device alone: what a graph holds."""
        lanes, size = self._lanes, key.bucket
        batch = lanes.batch(size, max_length, key.is_uneven)
        advance(
            lanes.rows_S[:size], lanes.starts_S[:size], self._rows.last_R, self._rows.tables_RB,
            self._cache.block_size, self._turn_1, self.depth, batch.ids_T, batch.positions_T, batch.slots_T,
            batch.lengths_S, batch.tables_SB, self._model.embedding_VE, lanes.hidden_SE[:size],
        )  # fmt: skip
        batch.embedded_TE = lanes.hidden_SE[:size]
        hidden_SE = self._model(batch, self._cache, self._backend)
        if key.path == GENERAL:
            lanes.hidden_SE[:size].copy_(hidden_SE)
            return
        tokens_S = lanes.winners_SW[:size]  # raised, then reset by the step's end: nothing between may ask for memory
        if key.path != GREEDY or not self._model.raise_winners(hidden_SE, self._sampling.num_tokens, tokens_S):
            numbers = None if key.path == GREEDY else {name: tensor[:size] for name, tensor in lanes.numbers.items()}
            tokens_S = self._sampling.choose(self._model.logits(hidden_SE, True), numbers, lanes.starts_S[:size])
        finish(tokens_S, hidden_SE, lanes.rows_S[:size], self._rows.last_R, self._home_DR, self._turn_1)

    def _spread_step(self, packed: Packed, slot: Slot, sent: Mapping[str, Tensor]) -> Drawn:
        """A step with prompts in it: no graph, and still nothing is read back."""
        self._turn_1.fill_(slot.index)
        if not packed.num_spans:
            return Drawn(None)
        batch, block_size = span_batch(packed, sent, self._cache.block_size), self._cache.block_size
        spread(
            batch.ids_T, sent["rows_T"], batch.positions_T, sent["rows_S"], batch.lengths_S, self._rows.last_R,
            self._rows.tables_RB, block_size, batch.slots_T, batch.tables_SB,
        )  # fmt: skip
        hidden_RE = self._model(batch, self._cache, self._backend)
        numbers = None if self._path == GREEDY else {name: sent[name] for name in NUMBERS}
        drawn = self._sampling.draw(
            packed, self._path, hidden_RE, self._model.logits, numbers, sent.get("next_positions")
        )  # fmt: skip
        self._finish(drawn, hidden_RE[: packed.num_samples], sent["rows_R"])
        return drawn

    def _finish(self, drawn: Drawn, hidden_RE: Tensor, rows_R: Tensor) -> None:
        if drawn.tokens_R is not None:
            finish(drawn.tokens_R, hidden_RE, rows_R, self._rows.last_R, self._home_DR, self._turn_1)

    def _without_newest(self, packed: Packed, slot: Slot) -> Packed:
        if not packed.num_spans:
            raise torch.OutOfMemoryError("the device has no memory even for an empty step")
        newest = max(packed.plan.spans, key=lambda span: self._packer.rows[span.row].turn)
        return self._without(newest.request, packed, slot)

    def _without(self, request: str, packed: Packed, slot: Slot) -> Packed:
        self._num_failed += 1
        log.warning("out of device memory: %s ends", request)
        fewer = slot.packed = self._packer.without(packed, request, OUT_OF_MEMORY)
        return fewer

    def _resend(self, packed: Packed, slot: Slot) -> dict[str, Tensor]:
        """Send the step in its new shape. What was started of the old one must end first: it reads the same staging."""
        self._streams.drain()
        layout = packed.layout
        if not packed.num_spans:
            return {}
        assert layout is not None
        self._path = self._sampling.path(layout.rows_R, bool(packed.plan.masks))
        numbers = None if self._path == GREEDY else self._sampling.arrays(layout.rows_R)
        sent = slot.send(span_arrays(layout, numbers))
        self._streams.wait("compute", slot.moments.ready)
        return sent

    @torch.inference_mode()
    def reload(self, source: Any) -> None:
        """Replace the weights. No step may be in flight; what the cache holds is stale then.

        A load that fails changes nothing.
        """
        from tandem.runner.startup import reload

        assert self._num_submitted == self._num_collected, "weights are replaced while a step is in flight"
        reload(self._model, source)
        self._streams.settle()

    def _keys(self, paths: Sequence[str], sizes: Sequence[int]) -> list[tuple[GraphKey, int]]:
        """Decode steps of up to 1,024 positions, the largest first."""
        bound = min(1024, graph_bound(self.facts.max_length))
        return [(self._decode_keys.key(size, path, bound), bound) for path in paths for size in reversed(sizes)]

    def list_decodes(self, paths: Sequence[str]) -> None:
        """Ask for the kernels of decode steps of all sizes, in whatever way kernels are compiled just now."""
        listed = self._keys(paths, [n for n in self._graphs.buckets if n in LISTED or n == self._graphs.limit])
        for key, bound in [*listed, *self._decode_keys.unlike(listed, self._graphs.buckets, self.facts.max_length)]:
            self._decode(key, bound)

    @torch.inference_mode()
    def warm_up(self, paths: Sequence[str], most_s: float) -> None:
        """Capture graphs, largest first, for at most so many seconds; the rest comes as needed."""
        keys = self._keys(paths, self._graphs.buckets)
        with self._streams.on("compute"):
            self._graphs.prepare(keys, most_s)
            self._turn_1.fill_(self.depth - 1)
        self._streams.drain()

    def close(self) -> None:
        """Wait for what is in flight and give the device's memory back. Idempotent."""
        self._streams.drain()
        self._graphs.clear()
        self._model, self._cache, self._slots = None, KVCache([], []), []
        self._streams.give_back()

    def statistics(self) -> dict[str, Any]:
        return {
            "rows_taken": self._packer.rows.num_taken,
            "in_flight": self._num_submitted - self._num_collected,
            "steps": self._num_collected,
            "graphs": len(self._graphs),
            "graph_capture_s": self._graphs.capture_s,
            "graph_pool_bytes": self._graphs.pool_bytes,
            "graph_rows": self._num_lanes_run,
            "graph_padding_rows": self._num_lanes_padded,
            "out_of_memory": self._num_failed,
        }


def _shapes(spec: Any) -> tuple[AttentionShape, ...]:
    """The distinct shapes of attention in the model's layers."""
    return tuple(dict.fromkeys(spec.attention_shape(layer) for layer in range(spec.num_layers)))
