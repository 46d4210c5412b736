"""What a kernel compiles to for a GPU of capability 9.0, on a machine without one."""

import os
import subprocess
import sys

COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from tandem.kernels import launch

class Absent:
    get_current_device = get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

driver.set_active(Absent())
run = JITFunction.run
made = []
def compile_only(self, *args, grid, warmup, **fixed):
    made.append(run(self, *args, grid=grid, warmup=True, **fixed))
JITFunction.run = compile_only
launch.FAST, launch.has_dependent_launch = False, lambda device: True
"""


def ptx_of(call: str) -> str:
    """The PTX of the first kernel that these lines launch (torch is imported), made in a process of its own."""
    program = f'{COMPILE}{call}\nprint(made[0].asm["ptx"])'
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
