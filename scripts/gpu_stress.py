"""Random load on the GPU runner under the real scheduler: the same tokens at every depth, every block home.

    python3 scripts/gpu_stress.py [--requests 500] [--depths 1 2 3]      equal tokens, deterministic mode
    compute-sanitizer --tool memcheck python3 scripts/gpu_stress.py --steps 2000 --depths 2

Requests come at random steps, with random lengths, two fifths of every other sixty sampled, some with penalties; some
are aborted at a random length. The KV pool holds 40 % of what the rows could need, so requests are preempted and
computed again. The order of events hangs on steps and tokens, not on time. --device cpu acts the streams out without
a GPU.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch

from tandem.attention.contract import KVCache
from tandem.models.registry import build, spec_from_config
from tandem.request import Request, SamplingParams
from tandem.runner.cuda import CudaRunner
from tandem.schedule.scheduler import Scheduler

CONFIG = {
    "model_type": "qwen3", "vocab_size": 66001, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
BLOCK_SIZE, MAX_TOKENS, POOL_SHARE = 16, 512, 0.4


def make_model(device: str, dtype: torch.dtype) -> Any:
    from tandem.layers.linear import linear_scheme

    model = build(
        spec_from_config(CONFIG), dtype, device, linear=linear_scheme(None, torch.device(device), device != "cpu")
    )
    torch.manual_seed(7)
    for target in model.targets().values():
        target.write(torch.randn(target.shape) * (0.06 if len(target.shape) > 1 else 1.0))
    return model


def make_runner(model: Any, device: str, num_blocks: int, num_rows: int, depth: int, uses_graphs: bool) -> CudaRunner:
    spec, place = model.spec, torch.device(device)
    shape = (spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    how: dict[str, Any] = {
        "num_rows": num_rows, "max_length": 1024, "max_tokens": MAX_TOKENS, "depth": depth, "uses_graphs": uses_graphs
    }  # fmt: skip
    cache = KVCache.allocate(*shape, model.embedding_VE.dtype, place)
    if device == "cpu":
        from tandem.attention.reference import ReferenceAttention
        from tandem.runner.streams import EagerStreams

        return CudaRunner(model, cache, ReferenceAttention(), EagerStreams(), **how)
    from tandem.attention.triton import TritonAttention
    from tandem.runner.streams import CudaStreams

    for layer in (*cache.keys, *cache.values):
        layer.fill_(torch.nan)  # what was never written must never matter
    return CudaRunner(model, cache, TritonAttention(place, deterministic=True), CudaStreams(place), **how)


def params_of(rng: random.Random, most: int) -> SamplingParams:
    new = rng.randint(1, most)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=new), SamplingParams(temperature=0.0, max_tokens=new),
        SamplingParams(temperature=0.9, top_p=0.9, seed=rng.getrandbits(40), max_tokens=new),
        SamplingParams(temperature=1.2, top_k=50, repetition_penalty=1.2, seed=rng.getrandbits(40), max_tokens=new),
    ]  # fmt: skip
    return rng.choices(kinds, (4, 4, 4, 1))[0]


class Load:
    """Requests with the step at which each comes and, for some, the number of tokens at which it is aborted."""

    def __init__(self, count: int, longest: int, seed: int) -> None:
        rng = random.Random(seed)
        self.requests, self.comes, self.aborted_at = [], [], {}
        step = 0.0
        for number in range(count):
            prompt = [rng.randrange(4096) for _ in range(rng.randint(1, longest))]
            params = params_of(rng, longest)
            if number // 60 % 2:  # in turns, so that some steps are greedy throughout: those take other kernels
                params = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
            self.requests.append(Request(f"r{number}", prompt, params))
            self.comes.append(int(step))
            step += rng.expovariate(1.0) * (0.0 if rng.random() < 0.2 else 2.5)
            if rng.random() < 0.15:
                self.aborted_at[f"r{number}"] = rng.randint(0, params.max_tokens)
        blocks = sorted(-(-(len(r.prompt) + r.params.max_tokens) // BLOCK_SIZE) for r in self.requests)
        self.mean_blocks, self.most_blocks = sum(blocks) / count, blocks[-1]


def drive(
    load: Load, runner: CudaRunner, num_blocks: int, num_rows: int, most_steps: int, most_s: float
) -> tuple[dict, Scheduler]:  # fmt: skip
    """Tokens by request. Ends when all is done, or, after so many steps or seconds, by aborting what is left."""
    planner = Scheduler(num_blocks, BLOCK_SIZE, num_rows, MAX_TOKENS, 1024, prefix_cache=True)
    outputs: dict[str, list[int]] = {request.id: [] for request in load.requests}
    coming, live, flight, step = deque(zip(load.comes, load.requests, strict=True)), set(), deque(), 0
    until_s = time.perf_counter() + most_s
    while coming or not planner.idle:
        if time.perf_counter() > until_s:
            most_steps = min(most_steps, step)
        while coming and coming[0][0] <= step and step < most_steps:
            request = coming.popleft()[1]
            planner.add(request)
            live.add(request.id)
        if step >= most_steps:
            coming.clear()
            for name in sorted(live):
                planner.abort(name)
            live.clear()
        plan = planner.plan() if len(flight) < runner.depth else None
        if plan is not None:
            flight.append(runner.submit(plan))
            step += 1
        elif not flight:
            step += 1  # nothing to do until the next one comes
        if flight and (plan is None or len(flight) == runner.depth):
            for change in planner.commit(runner.collect(flight.popleft())):
                assert change.error is None, change.error
                outputs[change.request] += change.tokens
                if change.finish is not None:
                    live.discard(change.request)
                elif len(outputs[change.request]) >= load.aborted_at.get(change.request, 1 << 30):
                    planner.abort(change.request)
                    live.discard(change.request)
            if step % 16 == 0:
                planner.check()
    planner.check()
    return outputs, planner


def agree(load: Load, first: dict[str, list[int]], other: dict[str, list[int]]) -> int:
    """How many requests differ: in any token, or, if aborted, in those that both runs brought home."""
    differ = 0
    for request in load.requests:
        one, two = first[request.id], other[request.id]
        if request.id in load.aborted_at:
            both = min(len(one), len(two))
            one, two = one[:both], two[:both]
        differ += one != two
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=300, help="most prompt tokens, and most new tokens")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1 << 30, help="stop after so many steps a depth")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many seconds a depth")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    CONFIG["num_hidden_layers"] = asked.layers
    load = Load(asked.requests, asked.longest, asked.seed)
    num_blocks = max(int(POOL_SHARE * asked.rows * load.mean_blocks), load.most_blocks + 1)
    model = make_model(asked.device, torch.bfloat16 if asked.device == "cuda" else torch.float32)
    found, failed = [], False
    for depth in asked.depths:
        began_s = time.perf_counter()
        runner = make_runner(model, asked.device, num_blocks, asked.rows, depth, not asked.no_graphs)
        with torch.inference_mode():
            outputs, planner = drive(load, runner, num_blocks, asked.rows, asked.steps, asked.seconds)
        statistics = planner.statistics()
        steps = runner.statistics()["steps"]
        runner.close()
        ended_early = asked.steps < 1 << 30 or asked.seconds < 1e9
        differ = agree(load, found[0][1], outputs) if found and not ended_early else 0
        whole = sum(len(outputs[r.id]) == r.params.max_tokens for r in load.requests)
        home = statistics.kv.num_owned == statistics.kv.num_tables == 0
        failed |= bool(differ) or not home
        row = {
            "depth": depth, "requests": asked.requests, "whole": whole, "tokens": sum(map(len, outputs.values())),
            "steps": steps, "preemptions": statistics.num_preemptions, "blocks": num_blocks, "differ": differ,
            "every block home": home, "seconds": round(time.perf_counter() - began_s, 1),
        }  # fmt: skip
        found.append((row, outputs))
        print(json.dumps(row), flush=True)
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / f"stress-{asked.steps if asked.steps < 1 << 30 else 'all'}.json"
        path.write_text(json.dumps([row for row, _ in found], indent=1))
    print("DIFFERENT or not home" if failed else "all equal, all home")
    sys.exit(failed)


if __name__ == "__main__":
    main()
