"""Time the attention of prompts on a Hopper GPU: our kernel, FlashInfer's paged prefill, cuDNN for whole prompts.

    python3 scripts/gpu_prefill.py            needs flashinfer-python and its module for bfloat16 and heads of 128

Chunks behind a prefix and whole prompts, alone and many together, with the heads of Llama-3.1-8B and Qwen3-0.6B, block
tables scattered. Each case is first compared with our kernel on the same numbers, into a poisoned output. Medians of
launches that wait in line behind a busy device, so that the host's time is not in them; what the host takes for a
schedule and a layer is timed apart. Prints a table and writes it to $OUT/prefill.json (or ./prefill.json).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
from torch import Tensor

from tandem.attention.contract import AttentionShape, Batch
from tandem.attention.flashinfer import flashinfer_attention
from tandem.attention.triton import TritonAttention
from tandem.errors import TandemError
from tandem.kernels.attention_library import whole_prompt_attention
from tandem.kernels.attention_prefill import prefill_attention

DEVICE, HEAD_DIM, BLOCK_SIZE = torch.device("cuda", 0), 128, 16
BUSY_CYCLES = 8_000_000  # some 4 ms in which the host runs ahead
HEADS = {"8B": (32, 8), "0.6B": (16, 8)}
CASES = {  # (start, tokens) of each span
    "8,192 alone": [(0, 8192)], "8,192 behind 8,192": [(8192, 8192)], "8,192 behind 24,576": [(24576, 8192)],
    "4,096 behind 4,096": [(4096, 4096)], "2,048 alone": [(0, 2048)], "2,048 behind 8,192": [(8192, 2048)],
    "1,024 alone": [(0, 1024)], "512 alone": [(0, 512)], "512 behind 4,096": [(4096, 512)],
    "256 behind 2,048": [(2048, 256)], "64 behind 4,096": [(4096, 64)], "2 × 8,192": [(0, 8192)] * 2,
    "4 × 2,048": [(0, 2048)] * 4, "16 × 512": [(0, 512)] * 16, "16 × 512 behind 2,048": [(2048, 512)] * 16,
    "64 × 128": [(0, 128)] * 64, "64 × 128 behind 512": [(512, 128)] * 64, "256 × 32": [(0, 32)] * 256,
}  # fmt: skip
MIXED = {"2,048 behind 8,192": (8192, 2048), "512 behind 4,096": (4096, 512)}  # beside 32 decodes of 2,048
Sent = tuple[Tensor, Tensor, Tensor, Batch, AttentionShape]


def made_up(spans: list[tuple[int, int]], heads: int, kv_heads: int) -> Sent:
    """Random queries, caches and tables of spans (start, tokens), those of one token first."""
    lengths = [start + tokens for start, tokens in spans]
    width, total = -(-max(lengths) // BLOCK_SIZE), sum(tokens for _, tokens in spans)
    blocks = torch.randperm(sum(-(-length // BLOCK_SIZE) for length in lengths), device=DEVICE)
    tables_SB = torch.zeros((len(spans), width), dtype=torch.int32, device=DEVICE)
    first = 0
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        tables_SB[row, :count] = blocks[first : first + count]
        first += count
    shape = (len(blocks), BLOCK_SIZE, kv_heads, HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    queries = torch.randn((total, heads, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE)
    starts = torch.tensor([0, *(tokens for _, tokens in spans)]).cumsum(0).to(DEVICE, torch.int32)
    nothing = torch.empty(0, dtype=torch.int64)
    batch = Batch(
        nothing, nothing, nothing, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), tables_SB, None,
        sum(tokens == 1 for _, tokens in spans), max(tokens for _, tokens in spans), max(lengths), host_spans=spans,
    )  # fmt: skip
    return queries, keys, values, batch, AttentionShape(heads, kv_heads, HEAD_DIM, HEAD_DIM**-0.5)


def device_us(run: Callable[[], object], count: int) -> float:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    moments = []
    for _ in range(count):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        moments.append((began, ended))
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in moments) * 1e3


def host_us(run: Callable[[], object], count: int = 40) -> float:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return statistics.median(found) * 1e6


def timed(spans: list[tuple[int, int]], heads: int, kv_heads: int, library: object) -> dict[str, float]:
    """µs by each of them, and by the best of them TFLOP/s of useful operations."""
    sent = queries, keys, values, batch, shape = made_up(spans, heads, kv_heads)
    own, other = (torch.full_like(queries, torch.nan) for _ in range(2))

    def run_own() -> None:
        prefill_attention(
            queries, keys, values, batch.tables_SB, batch.lengths_S, batch.query_starts_S1, batch.max_query, own,
            shape.scale,
        )  # fmt: skip

    schedule = library._plan(batch, spans, heads, kv_heads, BLOCK_SIZE)  # type: ignore[attr-defined]

    def run_library() -> None:
        library._run(schedule, *sent[:3], 0, shape.scale, other)  # type: ignore[attr-defined]

    def run_cudnn() -> None:
        first = 0
        for table_B, (_, tokens) in zip(batch.tables_SB, spans, strict=True):
            whole_prompt_attention(queries, keys, values, table_B, first, tokens, shape.scale)
            first += tokens

    run_own(), run_library()
    error = ((own.double() - other.double()).norm() / own.double().norm()).item()
    assert error < 6e-3, f"relative error {error:.1e} for {spans[:3]}"
    work = sum(4.0 * heads * HEAD_DIM * (tokens * start + tokens * (tokens + 1) / 2) for start, tokens in spans)
    count = 5 if work > 1e12 else 15
    row = {"own_us": device_us(run_own, count), "flashinfer_us": device_us(run_library, count)}
    if all(start == 0 and tokens >= 1024 for start, tokens in spans):
        row["cudnn_us"] = device_us(run_cudnn, count)
    return {**row, **{name.replace("_us", "_tflops"): work / us / 1e6 for name, us in row.items()}}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    ).parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no CUDA device.")
    try:
        library = flashinfer_attention(DEVICE, torch.bfloat16, HEAD_DIM, deterministic=False, builds=False)
    except TandemError as error:
        sys.exit(f"error: {error}")
    plain, rows = TritonAttention(DEVICE), []
    for model, (heads, kv_heads) in HEADS.items():
        for name, spans in CASES.items():
            rows.append({"model": model, "case": name, **timed(spans, heads, kv_heads, library)})
        for name, chunk in MIXED.items():
            sent = made_up([(2047, 1)] * 32 + [chunk], heads, kv_heads)
            times = {"own_us": device_us(lambda: plain.attend(*sent), 15)}  # noqa: B023
            times["flashinfer_us"] = device_us(lambda: library.attend(*sent), 15)  # noqa: B023
            rows.append({"model": model, "case": f"32 decodes + {name}", **times})
    for name in ("8,192 behind 8,192", "512 behind 4,096", "16 × 512"):
        spans = CASES[name]
        sent = queries, *_ = made_up(spans, 32, 8)
        plan = host_us(lambda: library._plan(sent[3], spans, 32, 8, BLOCK_SIZE))  # noqa: B023
        out, schedule = torch.empty_like(queries), library._plan(sent[3], spans, 32, 8, BLOCK_SIZE)
        layer = host_us(lambda: library._run(schedule, *sent[:3], 0, 0.1, out))  # noqa: B023
        rows.append({"model": "8B", "case": f"host, {name}", "schedule_us": plan, "layer_us": layer})
    for row in rows:
        print(" · ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    where = Path(os.environ.get("OUT", ".")) / "prefill.json"
    where.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
