"""How fast this device copies its own memory, and how many bytes a decode step must move. It runs no model.

floor of a step = (weights once + each cached token once) / the bandwidth that a copy reaches
"""

import time
from typing import Any

from tandem.engine.build import Built

GPU_BYTES, CPU_BYTES, LEAST_BYTES = 1 << 30, 1 << 27, 1 << 25
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def copy_bandwidth(device: str, repeats: int = 20) -> float | None:
    """Bytes a second, read and written both counted: the best of repeats copies between two large buffers.

    The buffers take at most half of the memory that is free. None on the null device, and where there is no room.
    """
    if device == "null":
        return None
    import torch

    on_gpu = device == "cuda"
    size = GPU_BYTES if on_gpu else CPU_BYTES
    if on_gpu:
        torch.cuda.empty_cache()
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    while size >= LEAST_BYTES:
        try:
            return _measure(torch, device, size // 4, repeats)
        except (torch.OutOfMemoryError, MemoryError):
            size //= 2
        except RuntimeError as error:  # what the host's allocator raises
            if "alloc" not in str(error):
                raise
            size //= 2
    return None


def _measure(torch: Any, device: str, num_elements: int, repeats: int) -> float:
    source = torch.ones(num_elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timed = _time_on_gpu if device == "cuda" else _time_copy
    best_s: float = min(timed(torch, source, target) for _ in range(repeats))
    num_bytes = 2.0 * 4 * num_elements
    del source, target
    if device == "cuda":
        torch.cuda.empty_cache()  # the runs need the memory
    return num_bytes / best_s


def _time_copy(torch: Any, source: Any, target: Any) -> float:
    began_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began_s


def _time_on_gpu(torch: Any, source: Any, target: Any) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    target.copy_(source)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def step_bytes(built: Built, batch: int, context: float) -> float:
    """Bytes that a decode step of batch requests with so many cached tokens each must read.

    An untied input embedding is not read as a whole, so it does not count. Of a mixture's experts those count that
    any of the tokens chooses, on average if all are as likely: X · (1 - (1 - C/X)^batch) of X, C chosen by each token.
    """
    spec = built.spec
    if spec is None:
        return 0.0
    parameters: float = spec.num_parameters - (0 if spec.tied else spec.num_logits * spec.hidden_size)
    mixture = spec.mixture
    if mixture is not None:
        share_left = (1.0 - mixture.num_chosen / mixture.num_experts) ** batch
        one = 3 * spec.hidden_size * mixture.intermediate_size
        parameters -= share_left * len(mixture.layers) * mixture.num_experts * one
    each = DTYPE_BYTES[built.resolved.settings.dtype or "float32"]
    cache = batch * context * built.shape.kv_elements_per_token * each
    return parameters * each + cache
