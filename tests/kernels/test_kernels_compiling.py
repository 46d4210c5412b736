"""Compiling in processes: the cache has what a launch would look for, nothing outlives it, failures cost time alone."""

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("triton")
if not hasattr(os, "fork"):
    pytest.skip("no fork", allow_module_level=True)

PROGRAM = """
import os, sys, time
import torch
from tandem.kernels.compiling import compile_in_processes
from tandem.kernels.launch import Target, compile_ahead, planning
from tandem.kernels.step import grow

H200, what = Target((9, 0), 132), sys.argv[1]
def list_kernels():
    if what == "fails":
        raise ValueError("made up")
    if what == "hangs":
        print("hangs", os.getpid(), file=open(sys.argv[2], "w"), flush=True)
        time.sleep(60)
    with torch.inference_mode():
        for count in (1, 3, 16):  # not specialised
            pairs, tables = (torch.empty(n, dtype=torch.int32, device="meta") for n in ((2, count), (8,)))
            grow(pairs, tables)

def entries():
    home = os.environ["TRITON_CACHE_DIR"]
    return sorted(os.listdir(home)) if os.path.exists(home) else []

began_s = time.perf_counter()
compiling = compile_in_processes(list_kernels, "wanted", H200)
if what == "orphan":
    pass
elif what == "hangs":
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    if len(sys.argv) > 3:
        os.abort()
    print(compiling.join(0.1), entries())
else:
    print(compiling.join(60.0))
    before = entries()
    with planning(H200), compile_ahead():  # as a process would that compiles for itself
        if what != "fails":
            list_kernels()
    print(len(before), before == entries())
    again = compile_in_processes(list_kernels, "wanted", H200)
    print(again._process is None, compile_in_processes(list_kernels, "else", H200)._process is None)
"""


def run(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *map(str, arguments)], env=environment, timeout=100, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


def test_a_process_finds_all_that_others_compiled_for_it_and_starts_none_for_what_is_there(tmp_path):
    done = run(tmp_path, "compiles")
    assert done.returncode == 0 and not done.stderr, done.stderr
    # One kernel and the mark; the second listing adds nothing, so the keys are the same.
    assert done.stdout.split() == ["True", "2", "True", "True", "False"]


def test_what_cannot_be_listed_is_left_to_the_process_itself(tmp_path):
    done = run(tmp_path, "fails")
    assert done.stdout.split()[0] == "False" and not done.stderr, done.stderr


@pytest.mark.parametrize("dies", [False, True])
def test_a_compiling_process_ends_when_time_is_over_or_its_parent_dies(tmp_path, dies):
    done = run(tmp_path, "hangs", tmp_path / "child", *(["dies"] if dies else []))
    assert dies or done.stdout.split() == ["False", "[]"], done.stdout + done.stderr
    child = int((tmp_path / "child").read_text().split()[1])
    end_s = time.perf_counter() + 5.0
    while os.path.exists(f"/proc/{child}") and time.perf_counter() < end_s:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{child}")
