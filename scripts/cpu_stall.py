"""How long running streams stand still when a long prompt arrives, and when that prompt speaks.

    python scripts/cpu_stall.py --target-step-ms 200     (0: prompts are cut by max_batch_tokens alone)

Four streams run; a prompt of 2,000 tokens comes; once it has spoken, all is ended. The prompt is another one each
round, so nothing is cached. Prints the worst gap between two tokens of a stream before the prompt came and while it was
computed, the 99th percentile of those gaps, and the prompt's time to first token; one line a round.
"""

import argparse
import asyncio
import time
from itertools import pairwise
from typing import Any

from tandem.engine.engine import AsyncEngine
from tandem.request import SamplingParams

NUM_STREAMS = 4


async def stream(engine: AsyncEngine, number: int, times: list[float]) -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)
    async with await engine.submit([100 + number] * 20, params) as updates:
        async for _ in updates:
            times.append(time.perf_counter())


async def play(engine: AsyncEngine, number: int, length: int) -> str:
    streams: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream(engine, i, times)) for i, times in enumerate(streams)]
    while min(map(len, streams)) < 40:
        await asyncio.sleep(0.01)
    began_s = time.perf_counter()
    prompt = [1000 + (number * 7919 + i * 31) % 40000 for i in range(length)]
    async with await engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0)) as updates:
        async for _ in updates:
            pass
    ended_s = time.perf_counter()
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = sorted((b - a, a < ended_s and b > began_s) for times in streams for a, b in pairwise(times[8:]))
    before, during = ([1000 * gap for gap, beside in gaps if beside is which] for which in (False, True))
    return (
        f"worst gap alone {before[-1]:7.0f} ms   beside the prompt {during[-1]:7.0f} ms (p99 "
        f"{during[int(len(during) * 0.99)]:.0f}, {len(during) // NUM_STREAMS} tokens a stream)   "
        f"prompt's first token {ended_s - began_s:6.2f} s"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-step-ms", type=float, default=200.0)
    parser.add_argument("--length", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    settings: dict[str, Any] = {"device": "cpu", "target_step_ms": asked.target_step_ms, "max_model_len": 8192}
    async with await AsyncEngine.start(**settings) as engine:
        for number in range(asked.rounds):
            print(await play(engine, number, asked.length), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
