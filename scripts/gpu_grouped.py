"""Check and time routing and grouped products of mixtures on a GPU: torch's kernel, ours, and ours with other tiles.

    python3 scripts/gpu_grouped.py [--tokens 1 8 32 64 256 2048] [--sweep]

Tokens choose their experts at random, anew in each of several rounds, so that a round's weights are not in the L2
cache; a figure is the median of a graph of one call a round. *tb_s* counts the weights of the experts that any token
chose, once, and the rows. Writes everything to $OUT/grouped.json (or ./grouped.json).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
from gpu_timing import micros_a_call
from torch import Tensor

from tandem.kernels import grouped_triton
from tandem.kernels.activation import gated
from tandem.kernels.grouped import grouped_torch
from tandem.kernels.launch import Target, compile_ahead, planning
from tandem.kernels.route import route_torch
from tandem.kernels.route_triton import route_triton

SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}  # experts, chosen, hidden, inner
ROUNDS = 6
TILES = [
    {"tokens": tokens, "rows": rows, "step": step, "num_warps": warps, "num_stages": stages}
    for tokens in (16, 32, 64, 128)
    for rows, warps in ((64, 4), (128, 4), (128, 8))
    for step, stages in ((64, 4), (128, 3))
]
ROWS: list[dict[str, object]] = []


def spread(num_tokens: int, num_experts: int, chosen: int) -> tuple[Tensor, int]:
    """Where groups end if each token chooses so many of the experts, and how many experts were chosen at all."""
    experts = torch.stack([torch.randperm(num_experts)[:chosen] for _ in range(num_tokens)]).flatten()
    counts = torch.bincount(experts, minlength=num_experts)
    return counts.cumsum(0).to("cuda", torch.int32), int((counts > 0).sum())


def micros(runs: list[Callable[[], object]]) -> float:
    """Median microseconds a call, of a graph that calls each once."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return micros_a_call(graph, len(runs))


def note(name: str, run: Callable[[Tensor], Tensor], ends: list[tuple[Tensor, int]], one: float, rows: float) -> None:
    try:
        taken = micros([partial(run, ends_X) for ends_X, _ in ends])
    except Exception as error:
        print(f"  FAILED {name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        torch.cuda.synchronize()
        return
    num_bytes = one * statistics.mean(count for _, count in ends) + rows
    row: dict[str, object] = {"name": name, "us": round(taken, 1), "tb_s": round(num_bytes / taken / 1e6, 2)}
    ROWS.append(row)
    print("  " + " ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def check(name: str, got: Tensor, want: Tensor) -> None:
    error = float((got.double() - want).norm() / want.norm())
    ROWS.append({"name": f"check {name}", "error": error, "ok": error < 6e-3})
    print(f"  {'ok' if error < 6e-3 else 'WRONG'} {name} {error:.1e}", flush=True)


def measure_routing(model: str, num_tokens: int) -> None:
    num_experts, chosen, _, _ = SHAPES[model]
    scores = [torch.randn(num_tokens, num_experts, device="cuda", dtype=torch.bfloat16) for _ in range(ROUNDS)]
    for name, way in (("torch", route_torch), ("ours", route_triton)):
        taken = micros([partial(way, scores_TX, chosen, True) for scores_TX in scores])
        ROWS.append({"name": f"{model} route T{num_tokens} {name}", "us": round(taken, 1)})
        print(f"  {model} route T{num_tokens} {name} us={taken:.1f}", flush=True)


def measure(model: str, num_tokens: int, sweep: bool) -> None:
    num_experts, chosen, hidden, inner = SHAPES[model]
    ends = [spread(num_tokens, num_experts, chosen) for _ in range(ROUNDS)]
    for what, size, outs, activation in (("gate_up", hidden, 2 * inner, "silu"), ("down", inner, hidden, None)):
        weight = torch.randn(num_experts, outs, size, device="cuda", dtype=torch.bfloat16) * size**-0.5
        rows = torch.randn(num_tokens * (1 if activation else chosen), size, device="cuda", dtype=torch.bfloat16)
        tag = f"{model} {what} T{num_tokens}"
        tokens_A = torch.randperm(num_tokens * chosen, device="cuda").int() // chosen if activation else None
        ours = partial(grouped_triton.grouped_triton, rows, weight, activation=activation, tokens_A=tokens_A)

        def library(
            ends_X: Tensor, rows: Tensor = rows, weight: Tensor = weight, tokens_A: Tensor | None = tokens_A
        ) -> Tensor:
            if tokens_A is None:
                return grouped_torch(rows, weight, ends_X)
            return gated(grouped_torch(rows[tokens_A], weight, ends_X), "silu")

        if num_tokens <= 64:
            first, sorted_rows = ends[0][0].tolist(), rows if tokens_A is None else rows[tokens_A]
            want = torch.cat([
                sorted_rows[begin:end].double() @ weight[group].double().T
                for group, (begin, end) in enumerate(zip([0, *first], first, strict=False)) if end > begin
            ])  # fmt: skip
            if activation:
                want = torch.nn.functional.silu(want[:, :inner]) * want[:, inner:]
            check(f"{tag} torch", library(ends[0][0]), want)
            check(f"{tag} ours", ours(ends[0][0]), want)
        moved = 2.0 * num_tokens * chosen * (size + outs)
        note(f"{tag} torch", library, ends, 2.0 * outs * size, moved)
        note(f"{tag} ours", ours, ends, 2.0 * outs * size, moved)
        kept = grouped_triton.tiles_of
        for tiles in TILES if sweep else ():
            grouped_triton.tiles_of = lambda *_, tiles=tiles: tiles
            note(
                f"{tag} {' '.join(f'{key} {value}' for key, value in tiles.items())}",
                ours,
                ends,
                2.0 * outs * size,
                moved,
            )
        grouped_triton.tiles_of = kept


def compile_share(number: int, num_shares: int) -> None:
    """Compile every num_shares-th of the sweep's variants into Triton's cache, without the card."""
    with planning(Target((9, 0), 132)), compile_ahead():
        for tiles in TILES[number::num_shares]:
            grouped_triton.tiles_of = lambda *_, tiles=tiles: tiles
            for num_experts, _, hidden, inner in SHAPES.values():
                for outs, size, activation in ((2 * inner, hidden, "silu"), (hidden, inner, None)):
                    rows, weight = (
                        torch.empty(shape, dtype=torch.bfloat16, device="meta")
                        for shape in ((16, size), (num_experts, outs, size))
                    )
                    ends_X = torch.empty(num_experts, dtype=torch.int32, device="meta")
                    tokens_A = torch.empty(16, dtype=torch.int32, device="meta") if activation else None
                    grouped_triton.grouped_triton(rows, weight, ends_X, activation, tokens_A)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256, 2048])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        return compile_share(*asked.compile)
    shares = min(os.cpu_count() or 1, 14) if asked.sweep else 0
    children = [
        subprocess.Popen([sys.executable, __file__, "--compile", str(number), str(shares)]) for number in range(shares)
    ]
    for child in children:
        child.wait()
    torch.manual_seed(0)
    out = Path(os.environ.get("OUT", ".")) / "grouped.json"
    with torch.inference_mode():
        for model in asked.models:
            for num_tokens in asked.tokens:
                print(f"{model}, {num_tokens} tokens", flush=True)
                measure_routing(model, num_tokens)
                measure(model, num_tokens, asked.sweep)
                out.write_text(json.dumps(ROWS, indent=0))
    wrong = [row["name"] for row in ROWS if row.get("ok") is False]
    print(f"{len(ROWS)} rows; wrong: {wrong or 'none'}")


if __name__ == "__main__":
    main()
