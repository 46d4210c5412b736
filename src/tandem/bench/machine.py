"""What a figure was measured on: processor, cores, load, device, versions, commit. It does not measure anything."""

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import tandem

BUSY_LOAD = 0.5  # a core


def machine_facts() -> dict[str, Any]:
    """Facts stored with every benchmark. Loads torch only if it is loaded already."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "tandem": tandem.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
            facts["gpus"] = torch.cuda.device_count()
            facts["cuda"] = torch.version.cuda
    return facts


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_warning() -> str | None:
    """A line for people if others use this machine: their work is in the figures. None if it is quiet."""
    load, cores = os.getloadavg()[0], num_cores()
    if load <= BUSY_LOAD * cores:
        return None
    return f"warning: this machine is busy: load {load:.1f} on {cores} cores; the figures will be too low and uneven."


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """The commit of the source tree, "+" behind it if there are changes; None outside a repository."""
    root = Path(tandem.__file__).parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    found = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True)
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
