"""One set of weights, kernels and cache on which several planners are measured in turn.

It knows build, not its insides.

Bed(settings, batch) ─► a runner ─► static │ synchronous (depth 1) │ tandem (depth 2) │ …
"""

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tandem.bench.drive import Run, SharedRunner, drive, requests_of
from tandem.bench.static_planner import StaticPlanner
from tandem.bench.workload import Asked, Workload
from tandem.config import AUTO
from tandem.engine.build import Built, build
from tandem.engine.sizing import num_known_ids
from tandem.observer import Observer
from tandem.plan import Planner
from tandem.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
STATIC = 0
NAMES = {
    STATIC: "static",
    1: "synchronous (depth 1)",
    2: "tandem (depth 2)",
    3: "tandem (depth 3)",
    4: "tandem (depth 4)",
}


class Bed:
    """Builds a runner that serves one planner after another; gives it back at the end of a ``with`` block.

    batch   most requests in a step of continuous batching, and the size of a static batch.
    padded  the runner gets twice as many rows: static batching computes prompts' padding in rows of its own.
    depth   the most that will be asked for.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        batch: int,
        *,
        padded: bool = True,
        depth: int = 2,
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> None:
        rows = 2 * batch if padded else batch
        chosen = {**settings, "max_num_seqs": rows, "prefix_cache": False, "depth": depth}
        budget = chosen.get("max_batch_tokens")
        if budget not in (None, AUTO):
            chosen["max_batch_tokens"] = max(int(budget), rows)
            if rows > int(budget):
                padding = ", those of static batching's padding included" if padded else ""
                on_phase(
                    f"max_batch_tokens is {rows}, not {budget}: a step has a token for each of {rows} rows{padding}"
                )
        self.batch = batch
        self.built: Built = build(chosen, on_phase, offline=True)
        self._taken: set[int] = set()

    @property
    def num_logits(self) -> int:
        return self.built.runner.facts.num_logits

    @property
    def num_known(self) -> int:
        """Ids that random prompts may use: those that the tokenizer knows, or all if there is none."""
        return num_known_ids(self.built.source.tokenizer_json) or self.num_logits

    @property
    def settings(self) -> dict[str, Any]:
        return self.built.resolved.as_dict()

    def run(
        self, depth: int, workload: Workload, *, batch: int | None = None, params: SamplingParams = GREEDY,
        eos: Sequence[int] = (), observers: Sequence[Observer] = (),
    ) -> Run:  # fmt: skip
        """Run a workload: depth 0 is static batching, else continuous batching with so many steps in flight."""
        planner = self._planner(depth, min(batch or self.batch, self.batch))
        shared = SharedRunner(self.built.runner, max(depth, 1), self._taken)
        gc.collect()  # now rather than in between
        try:
            return drive(NAMES[depth], planner, shared, requests_of(workload, params, eos), observers)
        finally:
            self._taken = shared.taken

    def warm(self, workload: Workload, depth: int = 1, num_steps: int = 4) -> None:
        """Run the prompts with short answers, of different lengths so that the batch shrinks by and by."""
        count = len(workload.asked)
        asked = tuple(
            Asked(a.prompt, max(1, min(a.max_tokens, 2 + i * num_steps // count))) for i, a in enumerate(workload.asked)
        )
        self.run(depth, Workload("warm-up", asked))

    def _planner(self, depth: int, batch: int) -> Planner:
        settings, facts = self.built.resolved.settings, self.built.runner.facts
        if depth == STATIC:
            return StaticPlanner(
                batch, num_blocks=facts.num_blocks, block_size=settings.block_size, num_rows=facts.num_rows,
                max_length=settings.max_model_len or facts.max_length, max_tokens=settings.max_batch_tokens or batch,
            )  # fmt: skip
        narrow = dataclasses.replace(settings, max_num_seqs=batch)
        resolved = dataclasses.replace(self.built.resolved, settings=narrow)
        return dataclasses.replace(self.built, resolved=resolved).scheduler()

    def close(self) -> None:
        self.built.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
