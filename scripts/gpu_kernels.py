"""Check and time tandem's kernels on a GPU: right against float64 first, then variants inside CUDA graphs.

    python3 scripts/gpu_kernels.py [--only decode,ragged,prefill,linear,layer,small,sample,winners] [--sweep]

Buffers rotate over more than the L2 cache, tensors are random, outputs are poisoned. Prints a short table last and
writes everything to $OUT/kernels.json (or ./kernels.json). Variants are compiled first, by one process a core.
Longer than other files, since a kernel's check, its variants and its timing are read side by side.
"""

# ruff: noqa: B023, E501, E731
# (Closures are called before their loop moves on; tables read best unbroken.)

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
import torch.nn.functional as F
from gpu_timing import micros_a_call

from tandem.kernels import launch
from tandem.kernels import linear as choice
from tandem.kernels.attention_form import decode_form, num_splits_for

COMPILING = "--compile" in sys.argv
DEVICE = torch.device("cpu" if COMPILING else "cuda")
PEAK = 4.27e12
ROWS: list[dict] = []
Run = Callable[[], object]


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    if COMPILING:
        return torch.empty(shape, dtype=dtype)
    return torch.randn(shape, dtype=dtype, device=DEVICE) * scale


def ints(values: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return values.to(device=DEVICE, dtype=dtype)


def timed(
    name: str, runs: list[Run], num_bytes: float = 0, flops: float = 0, calls: int = 24, **notes: object
) -> float:
    """Median microseconds a call, of a graph of ``calls`` calls that cycle through ``runs``."""
    if COMPILING:
        if MINE():
            runs[0]()
        return 0.0
    try:
        for run in runs[:2]:
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(calls):
                runs[number % len(runs)]()
        micro = micros_a_call(graph, calls)
    except Exception as error:
        print(f"  FAILED {name}: {type(error).__name__} {str(error)[:160]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")
    row = {"name": name, "us": round(micro, 2), **notes}
    if num_bytes:
        row |= {"tb_s": round(num_bytes / micro / 1e6, 3), "share": round(num_bytes / micro * 1e6 / PEAK, 3)}
    if flops:
        row["tflop_s"] = round(flops / micro / 1e6, 1)
    ROWS.append(row)
    print("  " + " ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return micro


def check(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm())
    ok = error < limit
    ROWS.append({"name": f"check {name}", "error": error, "ok": ok})
    print(f"  {'ok' if ok else 'WRONG'} {name} {error:.1e}", flush=True)


# ------------------------------------------------------------------------------------------------- attention
class Paged:
    """A cache with scattered block tables, and queries."""

    def __init__(self, spans: int, length: int, heads: int = 32, kv: int = 8, dim: int = 128, block: int = 16):
        blocks = -(-length // block)
        pool = spans * blocks + 3
        order = torch.arange(pool) if COMPILING else torch.randperm(pool)
        self.tables = ints(order[: spans * blocks].view(spans, blocks))
        self.keys, self.values = rand(pool, block, kv, dim), rand(pool, block, kv, dim)
        self.lengths = ints(torch.full((spans,), length))
        self.starts = ints(torch.arange(spans + 1))
        self.queries = rand(spans, heads, dim)
        self.out = torch.empty_like(self.queries)
        self.scale, self.num_bytes = dim**-0.5, 4.0 * spans * length * kv * dim


def attention_reference(p: Paged, starts: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
    out = torch.zeros(p.queries.shape, dtype=torch.float64, device=DEVICE)
    group = p.queries.shape[1] // p.keys.shape[2]
    for span in range(len(p.lengths)):
        length, a, b = int(p.lengths[span]), int(starts[span]), int(starts[span + 1])
        columns = torch.arange(length, device=DEVICE)
        blocks = p.tables[span, columns // p.keys.shape[1]].long()
        keys, values = (
            c[blocks, columns % p.keys.shape[1]].double().repeat_interleave(group, 1) for c in (p.keys, p.values)
        )
        score = torch.einsum("thd,nhd->htn", p.queries[a:b].double(), keys) * p.scale
        score = softcap * torch.tanh(score / softcap) if softcap else score
        positions = length - (b - a) + torch.arange(b - a, device=DEVICE)
        hidden = columns[None] > positions[:, None]
        hidden = hidden | (columns[None] <= positions[:, None] - window) if window else hidden
        out[a:b] = torch.einsum("htn,nhd->thd", score.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


def check_attention() -> None:
    from tandem.kernels import attention_decode as decode
    from tandem.kernels import attention_prefill as prefill
    from tandem.kernels.attention_invariant import invariant_decode_attention

    scratch = decode.Scratch(DEVICE)
    for heads, kv, dim, block, window, softcap in [
        (32, 8, 128, 16, None, None), (9, 3, 64, 16, 100, None), (16, 1, 256, 32, None, 30.0), (8, 8, 96, 16, None, None),
        (14, 2, 64, 128, 77, None), (16, 8, 128, 128, None, None),
    ]:  # fmt: skip
        p = Paged(7, 1999, heads, kv, dim, block)
        p.lengths = ints(torch.tensor([1999, 1, 65, 640, 777, 64, 1313]))
        want = attention_reference(p, p.starts, window, softcap)
        tag = f"H{heads} K{kv} D{dim} P{block} window {window} cap {softcap}"
        for splits in (1, 4, 16):
            p.out.fill_(torch.nan)
            decode.decode_attention(
                p.queries, p.keys, p.values, p.tables, p.lengths, p.out, scratch, p.scale, splits, window, softcap
            )
            check(f"decode {splits} splits {tag}", p.out, want, 6e-3)
        alone = torch.full_like(p.out, torch.nan)
        invariant_decode_attention(
            p.queries, p.keys, p.values, p.tables, p.lengths, 1999, alone, scratch, p.scale, window, softcap
        )
        check(f"invariant decode {tag}", alone, want, 6e-3)
        starts = ints(torch.tensor([0, 300, 301, 366, 400, 411, 475, 1000]))
        last, p.queries = p.queries, rand(1000, heads, dim)
        p.queries[starts[1:].long() - 1] = last
        want = attention_reference(p, starts, window, softcap)
        for invariant in (False, True):
            out = torch.full_like(p.queries, torch.nan)
            prefill.prefill_attention(
                p.queries, p.keys, p.values, p.tables, p.lengths, starts, 525, out, p.scale, window, softcap, invariant
            )
            check(f"prefill invariant {invariant} {tag}", out, want, 6e-3)
        same = bool((out[starts[1:].long() - 1] == alone).all())
        print(f"  {'ok' if same else 'DIFFERENT'} invariant decode and prefill agree bit for bit", flush=True)
        ROWS.append({"name": f"bitwise attention {tag}", "ok": same})


def decode_cases(sweep: bool) -> None:
    from tandem.kernels import attention_decode as decode

    scratch = decode.Scratch(DEVICE)
    shapes = [(32, 4352), (32, 1280), (256, 1280), (8, 512), (1, 512), (1, 32768)]
    for spans, length in shapes:
        sets = [Paged(spans, length) for _ in range(max(1, min(16, int(3e8 / (spans * length * 4096)))))]
        auto = num_splits_for(spans * 8, length, 64, 132)
        variants = [(auto, 2, 3, 64)]
        if sweep:
            variants += [(max(auto // 2, 1), 2, 3, 64), (auto * 2, 2, 3, 64), (auto, 2, 3, 64), (auto, 2, 3, 32)]
        for splits, warps, stages, tile in dict.fromkeys(variants):
            runs: list[Run] = [
                lambda p=p: decode.decode_attention(
                    p.queries, p.keys, p.values, p.tables, p.lengths, p.out, scratch, p.scale, splits, None, None,
                    warps, stages, tile,
                )
                for p in sets
            ]  # fmt: skip
            name = f"decode {spans}x{length} splits {splits} warps {warps} stages {stages} tile {tile}"
            timed(name, runs, sets[0].num_bytes)
        from tandem.kernels.attention_invariant import invariant_decode_attention

        runs = [
            lambda p=p, n=length: invariant_decode_attention(
                p.queries, p.keys, p.values, p.tables, p.lengths, n, p.out, scratch, p.scale
            )
            for p in sets
        ]
        timed(f"decode {spans}x{length} invariant", runs, sets[0].num_bytes)


def ragged_cases(sweep: bool) -> None:
    """Spans of different lengths, as they come and longest first; small batches with other tiles and stages."""
    from tandem.kernels import attention_decode as decode

    scratch = decode.Scratch(DEVICE)
    for spans in (224, 128, 64):
        sets = [Paged(spans, 1700) for _ in range(2)]
        generator = torch.Generator().manual_seed(1)
        for p in sets:
            p.lengths = ints(torch.randint(200, 1700, (spans,), generator=generator))
        num_bytes = 4.0 * 1024 * sum(int(p.lengths.sum()) if not COMPILING else 0 for p in sets) / 2
        for tile in (32, 64):
            for ordered in (False, True):
                orders = [ints(p.lengths.cpu().argsort(descending=True), torch.int64) for p in sets]
                runs: list[Run] = [
                    lambda p=p, o=o: decode.decode_attention(
                        p.queries, p.keys, p.values, p.tables, p.lengths, p.out, scratch, p.scale, 1, tile=tile,
                        order_S=o if ordered else None,
                    )
                    for p, o in zip(sets, orders, strict=True)
                ]  # fmt: skip
                timed(f"ragged {spans}x200-1700 tile {tile} {'longest first' if ordered else 'as they come'}", runs,
                      num_bytes)  # fmt: skip
    for spans, length in ((1, 512), (8, 512), (32, 1280)):
        sets = [Paged(spans, length, 16) for _ in range(max(1, min(16, int(3e8 / (spans * length * 4096)))))]
        auto = num_splits_for(spans * 8, length, 64, 132)
        for splits in (auto, auto // 2):
            for stages, tile in ((3, 64), (2, 64), (1, 64), (4, 32), (2, 128), (1, 128)):
                runs = [
                    lambda p=p: decode.decode_attention(
                        p.queries, p.keys, p.values, p.tables, p.lengths, p.out, scratch, p.scale, splits,
                        num_stages=stages, tile=tile,
                    )
                    for p in sets
                ]  # fmt: skip
                timed(f"small {spans}x{length} splits {splits} stages {stages} tile {tile}", runs, sets[0].num_bytes)


def prefill_cases(sweep: bool) -> None:
    from tandem.kernels.attention_prefill import prefill_attention

    for heads in (32, 16):
        for block in (16, 128):
            p = Paged(2, 8192, heads, 8, 128, block)
            p.queries = rand(16384, heads, 128)
            p.starts = ints(torch.tensor([0, 8192, 16384]))
            out = torch.empty_like(p.queries)
            variants = [(128, 128, 8, 3, False)]
            if sweep:
                variants += [(128, 128, 8, 4, False), (64, 64, 4, 3, False)]
            if block == 128:
                variants = [(*v[:4], True) for v in variants] + variants[:2]
            for rows, tile, warps, stages, descriptors in variants:
                run = lambda: prefill_attention(
                    p.queries, p.keys, p.values, p.tables, p.lengths, p.starts, 8192, out, p.scale,
                    rows=rows, tile=tile, num_warps=warps, num_stages=stages, descriptors=descriptors,
                )  # fmt: skip
                name = f"prefill 2x8192 H{heads} P{block} rows {rows} tile {tile} warps {warps} stages {stages}"
                timed(f"{name}{' tma' if descriptors else ''}", [run], flops=4.0 * 8192 * 8192 * heads * 128, calls=4)
            run = lambda: prefill_attention(
                p.queries, p.keys, p.values, p.tables, p.lengths, p.starts, 8192, out, p.scale, invariant=True
            )
            timed(f"prefill 2x8192 H{heads} P{block} invariant", [run], flops=4.0 * 8192 * 8192 * heads * 128, calls=4)
    if not COMPILING:
        library_prefill_cases()


def library_prefill_cases() -> None:
    """The library's attention on keys and values gathered from the cache, and what a new length costs the host."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for heads in (32, 16):
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            for length in (1024, 2048, 8192, 8000):
                p = Paged(2, length, heads, 8, 128, 16)
                queries = rand(2 * length, heads, 128)

                def run(p: Paged = p, length: int = length, queries: torch.Tensor = queries) -> None:
                    for span in range(2):
                        k, v = (
                            c[p.tables[span]].flatten(0, 1)[None, :length].transpose(1, 2) for c in (p.keys, p.values)
                        )
                        q = queries[None, span * length : span * length + length].transpose(1, 2)
                        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

                begun = time.perf_counter()
                try:
                    with sdpa_kernel(backend):
                        run()
                        host = time.perf_counter() - begun
                        flops = 4.0 * length * length * heads * 128
                        name = f"prefill 2x{length} H{heads} library {backend.name} gathered"
                        timed(name, [run], flops=flops, calls=4, first_call_ms=round(host * 1e3, 1))
                except Exception as error:
                    print(f"  FAILED {backend.name} {length}: {str(error)[:200]}", flush=True)


# ------------------------------------------------------------------------------------------------- linear
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
    "0.6B qkv": (4096, 1024), "0.6B o": (1024, 2048), "0.6B gate_up": (6144, 1024), "0.6B down": (1024, 3072), "8B head": (128256, 4096), "0.6B head": (151936, 1024),
}  # fmt: skip


def poisoned(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The output of a run whose memory held NaN before."""
    shape = run()
    for _ in range(3):  # the allocator gives the same memory again
        held = torch.full_like(shape, torch.nan)
        del held
    del shape
    return run()


def check_linear() -> None:
    from tandem.kernels import linear_triton as lin
    from tandem.kernels.linear_stream import stream

    for tokens, rows, size in [(1, 4096, 4096), (33, 1000, 1111), (64, 1024, 2048), (7, 768, 576), (8, 1008, 4032)]:
        x, weight, bias = rand(tokens, size), rand(rows, size, scale=size**-0.5), rand(rows)
        want = x.double() @ weight.double().T + bias.double()
        for parts in (1, 4):
            got = lin.skinny(x, weight, bias, tokens=64, rows=64, step=64, num_parts=parts)
            check(f"skinny {tokens} {rows} {size} parts {parts}", got if parts == 1 else got.sum(0), want, 5e-3)
        half = rows // 2
        if size % 64 == 0:
            for parts, tile in ((1, 8), (3, 16), (4, 64)):
                for step, stages in ((64, 3), (128, 4), (256, 2)):
                    if tile == 8 >= tokens or tile // 2 < tokens:
                        how = {"tokens": tile, "rows": 64, "step": step, "num_stages": stages}
                        got = poisoned(lambda: stream(x, weight, bias, num_parts=parts, **how))
                        check(
                            f"stream {tokens} {rows} {size} {how} parts {parts}",
                            got if got.dim() == 2 else got.sum(0),
                            want,
                            5e-3,
                        )
                        for activation in ("silu", "gelu") if rows % 16 == 0 else ():
                            for r in (64, 128):
                                got = poisoned(
                                    lambda: stream(x, weight, bias, activation=activation, **(how | {"rows": r}))
                                )
                                gate = (
                                    F.silu(want[:, :half])
                                    if activation == "silu"
                                    else F.gelu(want[:, :half], approximate="tanh")
                                )
                                check(
                                    f"stream {activation} rows {r} {tokens} {rows} {size} {how}",
                                    got,
                                    gate * want[:, half:],
                                    1e-2,
                                )
        got = lin.skinny(x, weight, bias, tokens=64, rows=64, step=64, activation="silu")
        check(f"gated {tokens} {rows} {size}", got, F.silu(want[:, :half]) * want[:, half:], 1e-2)
        summed = lambda y, dtype: choice.add_parts(y, dtype) if y.dim() == 3 else y
        for activation in (None, "silu", "gelu"):
            for count in (1, 8, 16, 33, 64, 65, 128, 200, 256, 517):
                batch = torch.cat([x, rand(517, size)])[:count]
                one, many = (choice.gated_linear(a, weight, None, activation, True) if activation else
                             summed(choice.linear_parts(a, weight, None, True), x.dtype)
                             for a in (batch[:1], batch))  # fmt: skip
                if activation is None or rows % 16 == 0:
                    same = bool((one == many[:1]).all())
                    ROWS.append({"name": f"bitwise {activation} {rows} {size} among {count}", "ok": same})
                    print(
                        f"  {'ok' if same else 'DIFFERENT'} invariant {activation} {rows} {size} among {count}",
                        flush=True,
                    )
        many = rand(517, size)
        many[:tokens] = x
        alone, among = (lin.invariant_linear(a, weight, bias, 3) for a in (x, many))
        check(f"invariant linear {tokens} {rows} {size}", alone, want, 5e-3)
        same = bool((alone == among[:tokens]).all())
        print(f"  {'ok' if same else 'DIFFERENT'} invariant linear alone and among", flush=True)
        ROWS.append({"name": f"bitwise linear {tokens} {rows} {size}", "ok": same})


def check_wide() -> None:
    """Tiles of many tokens, plain and gated, at numbers of tokens that fill none of them."""
    from tandem.kernels.linear_stream import stream

    for tokens in (65, 97, 127, 129, 200, 255, 256, 300):
        x, weight, bias = rand(tokens, 1088), rand(1008, 1088, scale=1088**-0.5), rand(1008)
        want = x.double() @ weight.double().T + bias.double()
        gate = F.silu(want[:, :504]) * want[:, 504:]
        for rows, tile in (*choice.WIDE_TILES, (128, 256)):
            if tile < 2 * tokens:
                how = {"tokens": tile, "rows": rows, "step": 128 if rows == 64 else 64, "num_stages": 3, "lag": 1,
                       "num_warps": 4 if rows == 64 else 8}  # fmt: skip
                for parts in (1, 2):
                    got = poisoned(lambda: stream(x, weight, bias, num_parts=parts, **how))
                    check(f"wide {tokens} {rows}x{tile} parts {parts}", got if parts == 1 else got.sum(0), want, 5e-3)
                got = poisoned(lambda: stream(x, weight, bias, activation="silu", **how))
                check(f"wide silu {tokens} {rows}x{tile}", got, gate, 1e-2)


def linear_cases(sweep: bool) -> None:
    from tandem.kernels.linear_stream import stream

    for name, (rows, size) in SHAPES.items():
        gated = "gate_up" in name
        weights = [rand(rows, size, scale=size**-0.5) for _ in range(max(3, min(24, int(4e8 / (rows * size * 2)))))]
        num_bytes = rows * size * 2.0
        for tokens in (1, 8, 32, 64, 128, 256):
            x = rand(tokens, size)
            if not COMPILING:
                timed(f"linear {name} T{tokens} library", [lambda w=w: F.linear(x, w) for w in weights], num_bytes)
            chosen = choice.stream_tiles_for(tokens, rows, size, 132, gated)
            if chosen is None:
                continue
            product = (lambda x, w: choice.gated_linear(x, w)) if gated else choice.linear_parts
            for how in ("own, weights after the wait", "own") if tokens <= 64 else ("own",):
                with variant(how):
                    runs: list[Run] = [lambda w=w: product(x, w) for w in weights]
                    timed(f"linear {name} T{tokens} {how}", runs, num_bytes)
            parts, step, stages = chosen["num_parts"], chosen["step"], chosen["num_stages"]
            changes = [{"step": step // 2, "num_stages": stages * 2}, {"num_stages": max(2, stages // 2)}]
            changes += [] if gated else [{"num_parts": parts * 2}, {"num_parts": max(1, parts // 2)}]
            changes += [{"lag": 1 - chosen["lag"]}]
            for change in changes if sweep else []:
                activation = "silu" if gated else None
                runs = [lambda w=w: stream(x, w, None, activation=activation, **(chosen | change)) for w in weights]
                timed(f"linear {name} T{tokens} {change}", runs, num_bytes)


# ------------------------------------------------------------------------------------------------- a whole layer
MODELS = {"8B": (4096, 32, 8, 14336, 3), "0.6B": (1024, 16, 8, 3072, 12)}  # hidden, heads, kv heads, inner, layers


BEFORE = {"norm": 2, "rope": 2, "linear": 2, "attention": 2}
# name → how: the products of whom, what DEPENDENT says instead of what was chosen
VARIANTS: dict[str, dict] = {
    "library": {"kind": "library"},
    "own, alone": {"dependent": dict.fromkeys(launch.DEPENDENT, 0)},
    "own, weights after the wait": {"stream": False, "dependent": BEFORE},
    "own, the library above 64": {"most": 64},
    "own": {},
    "invariant, in Triton above 64": {"kind": "invariant", "most": 64},
    "invariant": {"kind": "invariant"},
}


@contextmanager
def variant(name: str) -> Iterator[None]:
    how, chosen, has_streams = VARIANTS[name], dict(launch.DEPENDENT), choice.has_streams
    most, choice.MOST_TOKENS = choice.MOST_TOKENS, how.get("most", choice.MOST_TOKENS)
    launch.DEPENDENT.update(how.get("dependent", {}))
    if not how.get("stream", True):
        choice.has_streams = lambda device: False
    try:
        yield
    finally:
        launch.DEPENDENT.update(chosen)
        choice.has_streams, choice.MOST_TOKENS = has_streams, most


def layer_cases(sweep: bool) -> None:
    """A decode layer of eight kernels, once with the library's products and once batch-invariant."""
    from tandem.kernels import attention_decode as decode
    from tandem.kernels.activation_triton import gated_triton
    from tandem.kernels.attention_invariant import invariant_decode_attention
    from tandem.kernels.norm_triton import add_rms_norm_triton
    from tandem.kernels.rotary_triton import norm_rope_store_triton

    for model, (hidden, heads, kv, inner, layers) in MODELS.items():
        width = (heads + 2 * kv) * 128
        made = [
            (rand(width, hidden, scale=0.02), rand(hidden, heads * 128, scale=0.02), rand(2 * inner, hidden, scale=0.02),
             rand(hidden, inner, scale=0.02)) for _ in range(layers)
        ]  # fmt: skip
        norm, head_norm = rand(hidden, dtype=torch.float32), rand(128, dtype=torch.float32)
        table = rand(8192, 128, dtype=torch.float32)
        shapes = [(1, 512), (4, 512), (8, 512), *((n, 1280) for n in (16, 32, 40, 64, 80, 96, 128, 160, 192, 256))]
        for tokens, length in shapes + ([(32, 4352)] if sweep else []):
            caches = [Paged(tokens, length, heads, kv) for _ in range(layers if tokens <= 64 else 2)]
            scratch = decode.Scratch(DEVICE)
            form = decode_form(tokens, length, kv, heads // kv, 128, 2, launch.Target((9, 0), 132))
            positions = ints(torch.full((tokens,), length - 1), torch.int64)
            slots = [ints(c.tables[:, -1].cpu() * 16 + 15, torch.int64) for c in caches]
            residual = rand(tokens, hidden)
            num_bytes = sum(w.numel() for w in made[0]) * 2.0 + caches[0].num_bytes

            def layer(number: int, kind: str) -> None:
                qkv_w, o_w, up_w, down_w = made[number]
                c = caches[number % len(caches)]
                product = {
                    "library": F.linear, "own": choice.linear_parts, "invariant": lambda x, w: choice.linear_parts(x, w, None, True),
                }[kind]  # fmt: skip
                x, total = add_rms_norm_triton(state[0], state[1], norm, 1e-6)
                queries = norm_rope_store_triton(
                    product(x, qkv_w), positions, table, slots[number % len(caches)], c.keys, c.values, heads, head_norm,
                    head_norm,
                )  # fmt: skip
                if kind == "invariant":
                    invariant_decode_attention(
                        queries, c.keys, c.values, c.tables, c.lengths, length, c.out, scratch, c.scale
                    )
                else:
                    decode.decode_attention(
                        queries,
                        c.keys,
                        c.values,
                        c.tables,
                        c.lengths,
                        c.out,
                        scratch,
                        c.scale,
                        form.num_splits,
                        None,
                        None,
                        form.num_warps,
                        form.num_stages,
                        form.tile,
                        None,
                        form.ahead,
                    )
                x, total = add_rms_norm_triton(product(c.out.flatten(1), o_w), total, norm, 1e-6)
                if kind == "library":
                    x = gated_triton(F.linear(x, up_w), False)
                else:
                    x = choice.gated_linear(x, up_w, None, "silu", kind == "invariant")
                state[0], state[1] = product(x, down_w), total

            for name, how in VARIANTS.items():
                kind = how.get("kind", "own")
                if not (COMPILING and kind == "library") and not ("most" in how and tokens <= 64):
                    with variant(name):
                        state = [residual, residual]
                        runs: list[Run] = [lambda n=n, k=kind: layer(n, k) for n in range(layers)]
                        timed(f"layer {model} T{tokens} L{length} {name}", runs, num_bytes, calls=layers * 2)


# ------------------------------------------------------------------------------------------------- small, sample
def check_small() -> None:
    from tandem.kernels import activation, norm, rotary
    from tandem.kernels.activation_triton import gated_triton
    from tandem.kernels.norm_triton import add_rms_norm_triton, rms_norm_triton
    from tandem.kernels.rotary_triton import norm_rope_store_triton

    for tokens, size in [(1, 4096), (77, 1000), (300, 5376)]:
        x, residual, weight = rand(tokens, size), rand(tokens, size), rand(size, dtype=torch.float32)
        check(
            f"rms_norm {tokens} {size}",
            rms_norm_triton(x, weight, 1e-6),
            norm.rms_norm_torch(x.double(), weight.double(), 1e-6),
            4e-3,
        )
        parts = rand(3, tokens, size, dtype=torch.float32)
        for first in (x, parts):
            got, want = (
                add_rms_norm_triton(first, residual, weight, 1e-6),
                norm.add_rms_norm_torch(first, residual, weight, 1e-6),
            )
            check(f"add_rms_norm {first.dim()} {tokens} {size}", torch.cat(got), torch.cat(want), 4e-3)
        check("silu_mul", gated_triton(x, False), activation.silu_mul_torch(x.double()), 4e-3)
        check("gelu_tanh_mul", gated_triton(x, True), activation.gelu_tanh_mul_torch(x.double()), 4e-3)
    for heads, kv, dim, tokens in [(32, 8, 128, 5), (9, 3, 64, 300), (8, 1, 256, 33), (4, 4, 80, 3)]:
        weight = rand(dim, dtype=torch.float32)
        keys, values = rand(64, 16, kv, dim), rand(64, 16, kv, dim)
        other_keys, other_values = keys.clone(), values.clone()
        positions, slots = ints(torch.arange(tokens) + 3, torch.int64), ints(torch.randperm(1024)[:tokens], torch.int64)
        slots[tokens // 2] = -1
        table, qkv = rand(512, dim, dtype=torch.float32), rand(tokens, (heads + 2 * kv) * dim)
        got = norm_rope_store_triton(qkv, positions, table, slots, keys, values, heads, weight, weight)
        want = rotary.norm_rope_store_torch(
            qkv, positions, table, slots, other_keys, other_values, heads, weight, weight
        )
        check(f"rope {heads} {kv} {dim}", got, want, 6e-3)
        check("rope keys", keys, other_keys, 6e-3)
        check("rope values", values, other_values, 1e-9)


def chain_cases(sweep: bool) -> None:
    """What one kernel in a row of dependent ones takes, by how it lets its successor start."""
    from tandem.kernels.norm_triton import rms_norm_triton

    weight, x = rand(1024, dtype=torch.float32), rand(1, 1024)
    state = [x]

    def step() -> None:
        state[0] = rms_norm_triton(state[0], weight, 1e-6)

    kept = launch.DEPENDENT["norm"]
    for mode in (0, 1, 2):
        launch.DEPENDENT["norm"] = mode
        timed(f"chain of norms, dependent {mode}", [step], calls=200)
    launch.DEPENDENT["norm"] = kept


def small_cases(sweep: bool) -> None:
    from tandem.kernels.activation_triton import gated_triton
    from tandem.kernels.norm_triton import add_rms_norm_triton
    from tandem.kernels.rotary_triton import norm_rope_store_triton

    for tokens in (1, 32, 256, 8192):
        weight = rand(4096, dtype=torch.float32)
        x = [rand(tokens, 4096) for _ in range(8)]
        timed(
            f"add_rms_norm T{tokens} E4096",
            [lambda a=a: add_rms_norm_triton(a, x[0], weight, 1e-6) for a in x],
            tokens * 32768.0,
        )
        gate = [rand(tokens, 28672) for _ in range(4)]
        timed(f"silu_mul T{tokens} F14336", [lambda a=a: gated_triton(a, False) for a in gate], tokens * 86016.0)
        qkv = [rand(tokens, 6144) for _ in range(8)]
        keys, values = rand(tokens, 16, 8, 128), rand(tokens, 16, 8, 128)
        table = rand(8192, 128, dtype=torch.float32)
        places = ints(torch.arange(tokens), torch.int64)
        timed(
            f"norm_rope_store T{tokens} H32 K8",
            [lambda a=a: norm_rope_store_triton(a, places, table, places, keys, values, 32) for a in qkv],
            tokens * 24576.0,
        )


def check_sample() -> None:
    from tandem.kernels.sample import sample_torch
    from tandem.kernels.sample_triton import greedy_triton, sample_triton

    count = 64
    for dtype, vocabulary in ((torch.float32, 128256), (torch.bfloat16, 151936), (torch.float32, 1000)):
        logits = rand(count, vocabulary, dtype=dtype, scale=4.0)
        cycle = torch.arange(count, device=DEVICE)
        temperature = torch.tensor([0.0, 0.8, 1.0, 1.5], device=DEVICE)[cycle % 4]
        top_k = ints(torch.tensor([0, 0, 40, 1, 7])[cycle.cpu() % 5])
        top_p = torch.tensor([0.95, 1.0, 0.5], device=DEVICE)[cycle % 3]
        min_p = torch.tensor([0.0, 0.0, 0.1], device=DEVICE)[(cycle // 3) % 3]
        seeds = cycle * 2**40 - 5
        rows = (temperature, top_k, top_p, min_p, seeds, cycle)
        got, want = sample_triton(logits, *rows), sample_torch(logits, *rows)
        same = int((got == want).sum())
        print(f"  {'ok' if same >= count - 1 else 'WRONG'} sample V{vocabulary} {dtype}: {same} of {count} as the twin")
        ROWS.append({"name": f"sample {vocabulary} {dtype}", "ok": same >= count - 1, "same": same})
        best = (greedy_triton(logits) == logits.argmax(-1)).all()
        print(f"  {'ok' if best else 'WRONG'} greedy", flush=True)


def sample_cases(sweep: bool) -> None:
    from tandem.kernels.sample_triton import greedy_triton, sample_triton

    for vocabulary in (128256, 151936):
        for count in (1, 32, 256):
            logits = [rand(count, vocabulary, scale=3.0) for _ in range(4)]
            ones = torch.ones(count, device=DEVICE)
            zeros = ints(torch.zeros(count))
            at = ints(torch.arange(count), torch.int64)
            num_bytes = count * vocabulary * 2.0
            timed(f"greedy R{count} V{vocabulary}", [lambda a=a: greedy_triton(a) for a in logits], num_bytes)
            for label, k, p, t in (
                ("temperature", 0, 1.0, 0.8),
                ("top-p .95", 0, 0.95, 0.8),
                ("top-k 20 top-p .95", 20, 0.95, 0.8),
            ):
                rows = (ones * t, zeros + k, ones * p, ones * 0, at, at)
                timed(
                    f"sample R{count} V{vocabulary} {label}",
                    [lambda a=a: sample_triton(a, *rows) for a in logits],
                    num_bytes,
                )
            if not COMPILING:
                timed(f"argmax (library) R{count} V{vocabulary}", [lambda a=a: a.argmax(-1) for a in logits], num_bytes)


def check_winners() -> None:
    from tandem.kernels.sample import NOBODY, WINNER

    x, weight = rand(40, 1024), rand(70000, 1024, scale=0.03)
    winners = torch.full((40, WINNER), NOBODY, dtype=torch.int64, device=DEVICE)
    weight[69999:] *= 100.0  # ids that may not be chosen would win
    is_raised = choice.raise_winners(x, weight, 69999, winners)
    assert is_raised
    ids, exact = 0x7FFFFFFF - (winners[:, 0] & 0x7FFFFFFF), x.double() @ weight[:69999].double().T
    check("winners", exact.gather(1, ids[:, None])[:, 0], exact.amax(-1), 4e-3)


def winner_cases(sweep: bool) -> None:
    """From hidden states to the token that is kept: norm, logits, choice and the step's end, or winners for logits."""
    from tandem.kernels.norm_triton import rms_norm_triton
    from tandem.kernels.sample import NOBODY, WINNER
    from tandem.kernels.sample_triton import greedy_triton
    from tandem.kernels.step_triton import finish_triton

    for vocabulary, size in ((151936, 1024), (128256, 4096)):
        weight, norm = rand(vocabulary, size, scale=0.03), rand(size, dtype=torch.float32)
        for count in (1, 8, 16, 32, 48, 64):
            x, rows = rand(count, size), ints(torch.arange(count), torch.int64)
            last, home = ints(torch.zeros(count + 1), torch.int64), ints(torch.zeros(2, count), torch.int64)
            turn, winners = ints(torch.zeros(1)), ints(torch.full((count, WINNER), NOBODY), torch.int64)

            def logits_way() -> None:
                hidden = rms_norm_triton(x, norm, 1e-6)
                finish_triton(greedy_triton(choice.linear(hidden, weight)), hidden, rows, last, home, turn)

            def winners_way() -> None:
                hidden = rms_norm_triton(x, norm, 1e-6)
                choice.raise_winners(hidden, weight, vocabulary, winners)
                finish_triton(winners, hidden, rows, last, home, turn)

            for name, way in (("logits", logits_way), ("winners", winners_way)):
                timed(f"{name} T{count} V{vocabulary} E{size}", [way], weight.numel() * 2.0, calls=6)


CASES = {
    "small": (check_small, small_cases), "decode": (check_attention, decode_cases), "prefill": (None, prefill_cases), "ragged": (None, ragged_cases),
    "chain": (None, chain_cases),
    "linear": (check_linear, linear_cases), "wide": (check_wide, lambda sweep: None), "layer": (None, layer_cases), "sample": (check_sample, sample_cases),
    "winners": (check_winners, winner_cases),
}  # fmt: skip

_turn = [0]


def MINE() -> bool:  # noqa: N802
    """While compiling: whether this process compiles the next variant."""
    _turn[0] += 1
    share, shares = (int(v) for v in os.environ["TANDEM_COMPILE_SHARE"].split("/"))
    return _turn[0] % shares == share


def compile_only(names: list[str], sweep: bool) -> None:
    """Compile this process's share of the variants into the cache, for the card that is not asked."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: object = None) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Absent())
    run = JITFunction.run
    JITFunction.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
    launch.FAST = False
    launch.has_dependent_launch = lambda device: True  # type: ignore[assignment]
    choice.runs_triton, choice.has_streams = (lambda tensor: True), (lambda device: True)
    choice.F = argparse.Namespace(linear=lambda x, w, b=None: x.new_empty(x.shape[0], w.shape[0]))
    for name in names:
        CASES[name][1](sweep)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if asked.compile:
        return compile_only(names, asked.sweep)
    begun = time.perf_counter()
    shares = min(os.cpu_count() or 1, 15)
    command = [sys.executable, __file__, *sys.argv[1:], "--compile"]
    children = [
        subprocess.Popen(command, env={**os.environ, "TANDEM_COMPILE_SHARE": f"{n}/{shares}", "OMP_NUM_THREADS": "1"},
                         stderr=subprocess.PIPE, text=True) for n in range(shares)
    ]  # fmt: skip
    import triton

    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), flush=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in names:
            if CASES[name][0]:
                print(f"check {name}", flush=True)
                CASES[name][0]()
        errors = [child.communicate()[1] for child in children]
        print(
            f"checked and compiled in {time.perf_counter() - begun:.0f} s", *{e[-300:] for e in errors if e}, flush=True
        )
        out = Path(os.environ.get("OUT", ".")) / "kernels.json"
        for name in names:
            print(f"time {name} at {time.perf_counter() - begun:.0f} s", flush=True)
            CASES[name][1](asked.sweep)
            out.write_text(json.dumps(ROWS, indent=0))
    wrong = [row["name"] for row in ROWS if row.get("ok") is False]
    print(f"{len(ROWS)} rows, {time.perf_counter() - begun:.0f} s; wrong: {wrong or 'none'}")


if __name__ == "__main__":
    main()
