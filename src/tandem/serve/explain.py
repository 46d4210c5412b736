"""Where a request's whole time went: the engine's account, and what lay before and behind it here.

It knows times and the engine's ids; it does not know bodies. Both processes read one clock (CLOCK_MONOTONIC).

    received ─receive─► submitted ═ the engine's parts: queue, prefill, decode … ═► its news sent ─relay─► answered
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.engine import AsyncEngine

MAX_JOURNEYS = 1024


@dataclass(slots=True)
class Journey:
    """One HTTP request's way: when it came, when each of its prompts was handed over, when its answer was complete.

    engine_ids   for each prompt the engine's ids of its n answers.      Times are time.perf_counter seconds.
    """

    received_s: float
    submitted_s: list[float] = field(default_factory=list)
    engine_ids: list[tuple[str, ...]] = field(default_factory=list)
    answered_s: float | None = None

    def add(self, submitted_s: float, stream_id: str, num_answers: int) -> None:
        self.submitted_s.append(submitted_s)
        siblings = (f"{stream_id}.{index}" for index in range(1, num_answers))
        self.engine_ids.append((stream_id, *siblings))

    async def account(self, engine: AsyncEngine) -> dict[str, Any]:
        """The whole account, in seconds; the parts of each answer sum to its own end-to-end time.

        The answer that ended last decides the request's figures at the top.
        """
        answers: list[dict[str, Any]] = []
        end_s = time.perf_counter() if self.answered_s is None else self.answered_s
        for prompt, (handed_s, ids) in enumerate(zip(self.submitted_s, self.engine_ids, strict=True)):
            for index, name in enumerate(ids):
                account = await engine.call("account", name)
                if account is not None:
                    answers.append({"prompt": prompt, "index": index, **self._whole(account, handed_s, end_s)})
        if not answers:
            return {"total_s": end_s - self.received_s, "parts_s": {}, "answers": []}
        last = max(answers, key=lambda answer: -answer["parts_s"]["relay"])
        return {"total_s": last["total_s"], "parts_s": last["parts_s"], "answers": answers}

    def _whole(self, account: dict[str, Any], handed_s: float, end_s: float) -> dict[str, Any]:
        parts = {"receive": handed_s - self.received_s, **account["parts_s"]}
        relay_s = end_s - handed_s - account["total_s"]
        over_s = max(0.0, -relay_s)  # the engine was still busy with its delivery when the answer was complete here
        for part in ("delivery", "host_gap", "behind", "decode"):
            cut_s = min(over_s, parts[part])
            parts[part] -= cut_s
            over_s -= cut_s
        parts["relay"] = max(0.0, relay_s)
        more = {key: value for key, value in account.items() if key not in ("total_s", "parts_s")}
        return {"total_s": end_s - self.received_s, "parts_s": parts, **more}


class Journeys:
    """The journeys of the newest answers, by the id that the client was given."""

    def __init__(self, capacity: int = MAX_JOURNEYS) -> None:
        self._kept: OrderedDict[str, Journey] = OrderedDict()
        self._capacity = capacity

    def keep(self, name: str, journey: Journey) -> None:
        self._kept[name] = journey
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def find(self, name: str) -> Journey | None:
        return self._kept.get(name)

    def __len__(self) -> int:
        return len(self._kept)
