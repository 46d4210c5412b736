"""What a kernel compiles to for a GPU of capability 9.0, or another, on a machine without one."""

import json
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


FACTS = """
import json, os, re, subprocess, tempfile
from triton import knobs

def facts_of(kernel):
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=" + re.search("[.]target ([0-9a-z_]+)", ptx).group(1), source]
        told = subprocess.run([*command, "-o", source + ".out"], capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall("([0-9]+) bytes spill", told)))
    registers = int(re.search("Used ([0-9]+) registers", told).group(1))
    return {"registers": registers, "spilled": spilled, "shared": kernel.metadata.shared}

print(json.dumps([facts_of(kernel) for kernel in made]))
"""


def compiled_for(capability: int, calls: str) -> list[dict[str, int]]:
    """Registers a thread, bytes that ptxas spills and bytes of shared memory, of each kernel that is launched."""
    program = COMPILE.replace('"cuda", 90', f'"cuda", {capability}')
    program = program.replace("lambda device: True", f"lambda device: {capability >= 90}") + calls + FACTS
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
