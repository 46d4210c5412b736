"""FlashInfer's compiled prefill module: whether it can be used here, found, loaded, or built when that is asked for.

It knows versions, folders and compilers; it does not know how the module is called. Our own kernels need none of this.
"""

import importlib
import importlib.metadata
import logging
import os
import shutil
from typing import Any

import torch

log = logging.getLogger("tandem.attention")

DISTRIBUTION = "flashinfer-python"
TRIED = ("0.6.18.post1",)  # the module's functions are called as these versions do
CAPABILITY = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
REINSTALL, LEAVE = f"reinstall {DISTRIBUTION}.", "leave attention to tandem."


class UnavailableError(Exception):
    """FlashInfer cannot be used here. hint: what would help."""

    def __init__(self, reason: str, hint: str) -> None:
        self.hint = hint
        super().__init__(reason)


def is_installed() -> bool:
    return version() is not None


def version() -> str | None:
    """Of the installed distribution; it is not imported."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(device: torch.device, dtype: torch.dtype | None, head_dim: int | None, deterministic: bool) -> None:
    """Raise UnavailableError unless a model of this dtype and head dimension can be attended on the device."""
    found, pin = version(), f"pip install {DISTRIBUTION}=={TRIED[-1]}, or {LEAVE}"
    if found is None:
        raise UnavailableError(f"the package {DISTRIBUTION} is not installed", pin)
    if found not in TRIED:
        raise UnavailableError(f"{DISTRIBUTION} {found} was not tried with this version of tandem", pin)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        raise UnavailableError("its kernel for Hopper needs a GPU of compute capability 9.0", LEAVE)
    if deterministic:
        raise UnavailableError("it is not batch-invariant", f"drop --deterministic, or {LEAVE}")
    if dtype not in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        raise UnavailableError(
            f"it computes in bfloat16 and float16, not in {kind}", f"set --dtype bfloat16, or {LEAVE}"
        )
    if head_dim not in HEAD_DIMS:
        raise UnavailableError(f"it was tried with heads of 64 and 128 numbers, not of {head_dim}", LEAVE)


def load_module(dtype: torch.dtype, head_dim: int, builds: bool) -> Any:
    """The module, with its functions ``plan`` and ``paged_run``. Raises UnavailableError.

    builds  compile it if it is not there, which takes minutes.
    """
    try:
        modules = importlib.import_module("flashinfer.jit.attention.modules")
        # Types of queries, keys, result and block ids; then no position encoding, window, cap or sums in float16.
        spec = modules.gen_batch_prefill_module(
            "fa3", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
        )
        if not spec.is_compiled:
            _build(spec, builds)
        return spec.load(spec.get_library_path())
    except UnavailableError:
        raise
    except Exception as failure:  # an import, a folder that cannot be written, a library that does not fit
        raise UnavailableError(f"it cannot be loaded: {first_line(failure)}", REINSTALL) from failure


def _build(spec: Any, builds: bool) -> None:
    if not builds:
        hint = "run once with --attention flashinfer, which builds it in minutes."
        raise UnavailableError("its module for this model is not built yet", hint)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if shutil.which("nvcc") is None and (home is None or not os.path.exists(os.path.join(home, "bin", "nvcc"))):
        hint = f"install CUDA's compiler, or {LEAVE}"
        raise UnavailableError("its module for this model is not built, and there is no nvcc to build it", hint)
    log.warning("building FlashInfer's prefill module, once; this takes minutes")
    spec.build()


def first_line(failure: BaseException) -> str:
    """The first line of what a library says, which may be a page."""
    return (str(failure).strip() or type(failure).__name__).splitlines()[0][:200]
