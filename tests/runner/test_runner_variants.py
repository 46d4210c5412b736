"""The kernels that are listed ahead are those that steps ask for, told without a device."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys
from concurrent.futures import Executor, Future

import torch

from tandem.config import Settings
from tandem.kernels.launch import Target, compile_ahead, planning
from tandem.layers.linear import linear_scheme
from tandem.models.named import named_config
from tandem.models.registry import build, spec_from_config
from tandem.runner import variants
from tandem.attention.triton import TritonAttention
from tandem.plan import Arrival, Span, StepPlan
from tandem.request import SamplingParams

asked = []
class Noting(Executor):
    def submit(self, function):
        source = next(c.cell_contents for c in function.__closure__ if hasattr(c.cell_contents, "constants"))
        asked.append(source.name)
        done = Future()
        done.set_result(None)
        return done

spec = spec_from_config(named_config(sys.argv[1]))
dtype = getattr(torch, sys.argv[3])
rows, longest = map(int, sys.argv[4:6])
settings = Settings(
    dtype=sys.argv[3], max_model_len=longest, max_num_seqs=rows, max_batch_tokens=1024, depth=2,
    deterministic=sys.argv[2] == "exact",
)  # fmt: skip
num_tokens = spec.num_logits - int(sys.argv[6])

def beside(count, params):
    # A prompt beside so many answers.
    runner, rows = variants._runner(model, backend, settings, dtype, num_tokens), range(count)
    runner.submit(variants._prompts(0, [1] * count, params))
    spans = [*(Span(str(row), row, 1, 1, (), True) for row in rows), Span(str(count), count, 0, 100, (0,), True)]
    arrival = Arrival(str(count), count, [0] * 100, 100, params)
    runner.submit(StepPlan(1, spans, [arrival], num_decodes=count))

with planning(Target((9, 0), 132)), compile_ahead(Noting()), torch.inference_mode():
    variants.list_kernels(spec, settings, num_tokens)
    listed, has_solver = list(asked), "sympy" in sys.modules
    place = torch.device("meta")
    scheme = linear_scheme(None, place, settings.deterministic)
    model = build(variants._few_layers(spec), dtype, place, linear=scheme, max_length=longest)
    backend = TritonAttention(place, settings.deterministic)
    for first, others, params in ((3, [7], 0), (33, [1, 70, 120], 0), (64, [512, 300], 1), (17, [5] * 40, 1)):
        if len(others) >= rows:
            continue
        runner = variants._runner(model, backend, settings, dtype, num_tokens)
        runner.submit(variants._prompts(0, [first], variants.WAYS[params]))
        runner = variants._runner(model, backend, settings, dtype, num_tokens)
        runner.submit(variants._prompts(0, [1], variants.WAYS[params]))
        runner.submit(variants._prompts(1, others, variants.WAYS[params], decode=True))
    for count in (1, 5, 16, 17, 33, 63, 100):
        for params in (*variants.WAYS, SamplingParams(temperature=0.0, logprobs=1)):
            if count < rows:
                beside(count, params)
    runner = variants._runner(model, backend, settings, dtype, num_tokens)
    for key, bound in runner._keys(("greedy", "plain", "general"), runner._graphs.buckets):
        runner._decode(key, bound)
    for size in runner._graphs.buckets:
        for bound in (256, 2048, 8192)[:3 if longest > 512 else 1]:
            for is_uneven in (False, True):
                runner._decode(runner._decode_keys.key(size, "greedy", bound, is_uneven), bound)
print(len(listed), sorted(set(listed)))
print(asked[len(listed):], torch.cuda.is_initialized(), has_solver)
"""


def listed_and_others(folder, *arguments, padding="267"):
    """padding: rows of the output matrix behind the vocabulary."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *arguments, padding], env=environment, timeout=100, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize(
    ("model", "how", "rows", "longest"),
    [
        ("llama-3.1-8b", "quick", 100, 512), ("qwen3-0.6b", "exact", 64, 512), ("qwen3-0.6b", "quick", 256, 8192),
        ("qwen3-0.6b", "exact", 8, 8192), ("mistral-7b", "exact", 40, 8192), ("gemma-3-1b", "quick", 64, 512),
        ("gemma-3-1b", "exact", 48, 512),
    ],
)  # fmt: skip
def test_steps_of_other_sizes_need_no_kernel_that_was_not_listed(model, how, rows, longest, tmp_path):
    listed, others = listed_and_others(tmp_path, model, how, "bfloat16", str(rows), str(longest))
    for name in ("_advance", "_decide", "_finish", "_grow", "_norm", "_prefill", "_rope", "_spread", "_stretch"):
        assert f"'{name}_kernel'" in listed
    # Nor is a solver imported, which takes longer than all of the listing, but for what Gemma's embedding is scaled by.
    assert others == f"[] False {model.startswith('gemma')}"


@pytest.mark.parametrize(
    ("model", "how", "dtype"),
    [
        ("mixtral-8x7b", "quick", "bfloat16"), ("mixtral-8x7b", "quick", "float32"),
        ("mixtral-8x7b", "exact", "float16"), ("qwen3-30b-a3b", "quick", "float16"),
        ("qwen3-30b-a3b", "quick", "float32"), ("qwen3-30b-a3b", "exact", "bfloat16"),
    ],
)  # fmt: skip
def test_mixtures_are_listed_in_every_dtype(model, how, dtype, tmp_path):
    listed, others = listed_and_others(tmp_path, model, how, dtype, "64", "512")
    assert all(f"'_{name}_kernel'" in listed for name in ("choose", "combine", "grouped", "place"))
    assert others.startswith("[] False ")
