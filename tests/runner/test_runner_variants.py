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

asked = []
class Noting(Executor):
    def submit(self, function):
        source = next(c.cell_contents for c in function.__closure__ if hasattr(c.cell_contents, "constants"))
        asked.append(source.name)
        done = Future()
        done.set_result(None)
        return done

spec = spec_from_config(named_config(sys.argv[1]))
settings = Settings(
    dtype="bfloat16", max_model_len=512, max_num_seqs=64, max_batch_tokens=1024, deterministic=sys.argv[2] == "exact",
    depth=2,
)  # fmt: skip
with planning(Target((9, 0), 132)), compile_ahead(Noting()), torch.inference_mode():
    variants.list_kernels(spec, settings)
    listed = list(asked)
    place = torch.device("meta")
    scheme = linear_scheme(None, place, settings.deterministic)
    model = build(variants._few_layers(spec), torch.bfloat16, place, linear=scheme, max_length=512)
    backend = TritonAttention(place, settings.deterministic)
    for first, others, params in ((3, [7], 0), (33, [1, 70, 120], 0), (64, [512, 300], 1), (17, [5] * 40, 1)):
        runner = variants._runner(model, backend, settings, torch.bfloat16, None)
        runner.submit(variants._prompts(0, [first], variants.WAYS[params]))
        runner = variants._runner(model, backend, settings, torch.bfloat16, None)
        runner.submit(variants._prompts(0, [1], variants.WAYS[params]))
        runner.submit(variants._prompts(1, others, variants.WAYS[params], decode=True))
    runner = variants._runner(model, backend, settings, torch.bfloat16, None)
    for key, bound in runner._keys(("greedy", "plain", "general"), runner._graphs.buckets):
        runner._decode(key, bound)
print(len(listed), sorted(set(listed)))
print(asked[len(listed):], torch.cuda.is_initialized(), "sympy" in sys.modules)
"""


@pytest.mark.parametrize(("model", "how"), [("llama-3.1-8b", "quick"), ("qwen3-0.6b", "exact")])
def test_steps_of_other_sizes_need_no_kernel_that_was_not_listed(model, how, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, model, how], env=environment, timeout=100, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed, others = done.stdout.strip().splitlines()
    for name in ("_advance", "_decide", "_finish", "_grow", "_norm", "_prefill", "_rope", "_spread", "_stretch"):
        assert f"'{name}_kernel'" in listed
    assert others == "[] False False"  # nor is a solver imported, which takes longer than all of the listing
