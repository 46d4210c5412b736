"""One set of weights, kernels and cache on which several planners are measured. It knows build, not what it builds.

Bed.open(settings) ─► runner (depth 3) ─► run("static" | depth 1 | depth 2 | depth 3)
"""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.bench.drive import RecordingMailbox
from tandem.engine.build import make_loop
from tandem.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Bed:
    """A runner that serves one planner after another.

    batch   most requests in a step of continuous batching, and the size of a static batch; the runner has twice as
            many rows, since static batching computes the padding of a prompt in a row of its own.
    """

    def __init__(self, settings: Mapping[str, Any], batch: int, *, depth: int = 2, on_phase: Callable[[str], None] = lambda text: None) -> None:  # fmt: skip  # noqa: E501
        chosen = {"max_batch_tokens": max(512, 2 * batch), **settings}
        chosen |= {"max_num_seqs": 2 * batch, "prefix_cache": False, "depth": depth}
        self.batch = batch
        loop, self.card = make_loop(chosen, RecordingMailbox([]), on_phase)
        self._runner = loop.runner
        self._taken: set[int] = set()
