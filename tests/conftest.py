"""Settings for every test: one arithmetic thread a process, Ctrl-C as in a terminal, no GPU tests without a GPU."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported; pytest runs two processes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a shell's background; children would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when Triton is first imported, by whichever test

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
