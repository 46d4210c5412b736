"""The step kernels against their twins, in Triton's interpreter, which must be chosen before Triton is imported."""

import importlib.util
import os
import random
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself, see below")
@pytest.mark.parametrize("task", ["compare", "compile"])
def test_step_kernels_equal_their_twins_and_compile(task):
    """The interpreter takes code that the compiler does not, so both are asked; compiling needs no GPU."""
    chosen = {**os.environ, "TRITON_INTERPRET": "1" if task == "compare" else "0"}
    done = subprocess.run([sys.executable, __file__, task], env=chosen, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_step_kernels_equal_their_twins_on_a_gpu():
    compare("cuda")


def compare(device):
    torch.manual_seed(0)
    random.seed(0)
    for trial in range(8):
        tables_RB = torch.randint(0, 50, (8, 9), dtype=torch.int32, device=device)
        last_R = torch.randint(0, 99, (8,), device=device)
        count = random.randint(1, 6)
        rows_S = torch.randperm(7, device=device)[:count]
        if trial % 2:
            rows_S[random.randrange(count)] = -1
        compare_advance(rows_S, last_R, tables_RB, embeds=trial % 3 > 0)
        compare_spread(count, last_R, tables_RB)
        compare_finish(trial, rows_S, last_R)


def compare_advance(rows_S, last_R, tables_RB, embeds):
    from tandem.kernels import step, step_triton

    count, device = len(rows_S), rows_S.device
    starts_S, found = torch.randint(0, 35, (count,), device=device), []
    embedding_VE = torch.randn(99, 1100, device=device)
    for run in (step.advance_torch, step_triton.advance_triton):
        starts, turn = starts_S.clone(), torch.tensor([1], dtype=torch.int32, device=device)
        wide = [torch.full((count,), -7, device=device) for _ in range(3)]
        lengths = torch.full((count,), -7, dtype=torch.int32, device=device)
        tables = torch.zeros((count, 9), dtype=torch.int32, device=device)
        embedded_SE = torch.full((count, 1100), 7.0, device=device)
        extra = (embedding_VE, embedded_SE) if embeds else ()
        run(rows_S, starts, last_R, tables_RB, 4, turn, 2, *wide, lengths, tables, *extra)
        assert torch.equal(embedded_SE, embedding_VE[wide[0]]) if embeds else (embedded_SE == 7.0).all()
        found.append((starts, turn, *wide, lengths, used_of(tables, lengths)))
    for twin, kernel in zip(*found, strict=True):
        assert torch.equal(twin, kernel)


def compare_spread(count, last_R, tables_RB):
    from tandem.kernels import step, step_triton

    device = last_R.device
    counts = [random.randint(1, 150 if count < 3 else 9) for _ in range(count)]
    starts = [random.randint(0, 20) % max(1, 36 - n) for n in counts]
    rows_S = torch.randint(0, 7, (count,), device=device)
    rows_T = torch.repeat_interleave(rows_S, torch.tensor(counts, device=device))
    positions = [p % 36 for s, n in zip(starts, counts, strict=True) for p in range(s, s + n)]
    positions_T = torch.tensor(positions, device=device)
    lengths_S = torch.tensor([min(s + n, 36) for s, n in zip(starts, counts, strict=True)], device=device).int()
    ids_T, found = torch.randint(-1, 5, (len(positions),), device=device), []
    for run in (step.spread_torch, step_triton.spread_triton):
        ids, slots = ids_T.clone(), torch.full((len(ids_T),), -9, device=device)
        tables = torch.zeros((count, 9), dtype=torch.int32, device=device)
        run(ids, rows_T, positions_T, rows_S, lengths_S, last_R, tables_RB, 4, slots, tables)
        found.append((ids, slots, used_of(tables, lengths_S)))
    for twin, kernel in zip(*found, strict=True):
        assert torch.equal(twin, kernel)


def compare_finish(trial, rows_S, last_R):
    from tandem.kernels import step, step_triton
    from tandem.kernels.sample import NOBODY

    count, device = len(rows_S), rows_S.device
    hidden_SE, found = torch.randn(count, 1500, device=device), []
    hidden_SE[-1, 1499] = (float("nan"), float("inf"), 1.0)[trial % 3]
    for run in (step.finish_torch, step_triton.finish_triton):
        last, home_DR = last_R.clone(), torch.zeros((3, 8), dtype=torch.int64, device=device)
        turn_1 = torch.tensor([2], dtype=torch.int32, device=device)
        run(torch.arange(count, device=device) + 5, hidden_SE, rows_S, last, home_DR, turn_1)
        found.append((last[:-1], home_DR))
    for twin, kernel in zip(*found, strict=True):
        assert torch.equal(twin, kernel)
    assert (found[0][1][2, count - 1] == -1) == (trial % 3 < 2)
    winners_SW, found = torch.full((count, 16), NOBODY, device=device), []
    winners_SW[:, 0] = torch.randint(-(1 << 62), 1 << 62, (count,), device=device)
    winners_SW[0, 0] = (NOBODY, winners_SW[0, 0])[trial % 2]
    for run in (step.finish_torch, step_triton.finish_triton):
        last, home_DR, sent = last_R.clone(), torch.zeros((3, 8), dtype=torch.int64, device=device), winners_SW.clone()
        turn_1 = torch.tensor([1], dtype=torch.int32, device=device)
        run(sent, hidden_SE, rows_S, last, home_DR, turn_1)
        found.append((last[:-1], home_DR, sent))
        assert (sent == NOBODY).all()
    for twin, kernel in zip(*found, strict=True):
        assert torch.equal(twin, kernel)


def used_of(tables_SB, lengths_S):
    """The entries that count."""
    columns = torch.arange(tables_SB.shape[1], device=tables_SB.device)
    return torch.where(columns < (lengths_S[:, None] + 3) // 4, tables_SB, -1)


def compile_for(capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tandem.kernels import step_triton

    wide, narrow = "*i64", "*i32"
    signatures = {
        step_triton._spread_kernel: [wide] * 4 + [narrow, wide, narrow, wide, narrow] + ["i32"] * 4,
        step_triton._advance_kernel: [wide] * 3
        + [narrow] * 2
        + [wide] * 3
        + [narrow] * 2
        + ["*bf16"] * 2
        + ["i32"] * 4,
        step_triton._finish_kernel: [wide, "*bf16", wide, wide, wide, narrow] + ["i32"] * 4,
    }
    for kernel, kinds in signatures.items():
        names = kernel.arg_names
        known = {"P": 16, "TILE": 128, "PDL": 2 * (capability >= 90), "WINNERS": True}
        chosen = {name: known[name] for name in names[len(kinds) :]}
        signature = dict(zip(names, kinds + ["constexpr"] * len(chosen), strict=True))
        constants = {(names.index(name),): value for name, value in chosen.items()}
        target = GPUTarget("cuda", capability, 32)
        assert triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target).asm["ptx"]


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        compare("cpu")
    else:
        compile_for(80)
        compile_for(90)
