"""What fits where: the machine's facts, the KV cache's size, the lengths that follow. It knows no runner by name."""

import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

from tandem.config import Facts, Resolved, Settings
from tandem.errors import DeviceMemoryError, SettingError
from tandem.runner.contract import RunnerFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LEAST_BYTES = 1 << 16  # left beside the weights, so that something can be said of the KV cache


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model that memory and limits depend on.

    kv_elements_per_token   2 · layers · KV heads · head dimension.
    dtype                   what the checkpoint stores, or None.
    stored                  on a CPU, by scheme of linear layers: bytes whatever the dtype, and elements of it.
    """

    num_logits: int
    max_length: int
    num_parameters: int = 0
    kv_elements_per_token: int = 1
    dtype: str | None = None
    stored: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def weights_bytes(self, device: str, dtype: str, quantize: str | None) -> int:
        """What the loaded weights take."""
        known = self.stored.get(quantize or "dense") if device == "cpu" else None
        fixed_bytes, num_elements = known or (0, self.num_parameters)
        return fixed_bytes + num_elements * DTYPE_BYTES[dtype]


def facts_of(
    shape: Shape,
    device: str,
    device_name: str | None = None,
    device_bytes: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> Facts:
    """The facts for Settings.resolve. Raises DeviceMemoryError if the weights are larger than the free memory.

    device_bytes   free memory of a device that is not the host.
    dtype          what was asked for; None is the default of the device.      quantize  the scheme of linear layers.
    """
    chosen = dtype or (shape.dtype if device == "cuda" else None) or "float32"
    each = DTYPE_BYTES[chosen]
    free_bytes = free_host_bytes() if device_bytes is None else device_bytes
    weights_bytes = shape.weights_bytes(device, chosen, quantize)
    if weights_bytes > free_bytes - LEAST_BYTES:
        raise _weights_too_large(shape, device, chosen, quantize, free_bytes)
    return Facts(
        device=device,
        device_name=device_name or host_name(),
        cores=num_cores(),
        free_bytes=free_bytes - weights_bytes,
        context_length=shape.max_length,
        num_parameters=shape.num_parameters,
        kv_bytes_per_token=shape.kv_elements_per_token * each,
        model_dtype=shape.dtype,
    )


def _weights_too_large(
    shape: Shape, device: str, dtype: str, quantize: str | None, free_bytes: int
) -> DeviceMemoryError:  # fmt: skip
    place = "the device" if device == "cuda" else "the machine"
    largest = free_bytes / DTYPE_BYTES["bfloat16"] / 1e9
    hint = f"take a model of less than {largest:.1f} billion parameters, or free memory of other processes."
    half_bytes = shape.weights_bytes(device, "bfloat16", quantize)
    if DTYPE_BYTES[dtype] == DTYPE_BYTES["float32"] and half_bytes < free_bytes:
        hint = f"set dtype to bfloat16, in which they take {_gib(half_bytes)}, or {hint}"
    if device == "cpu" and quantize in (None, "dense"):
        sizes = ((scheme, shape.weights_bytes(device, dtype, scheme)) for scheme in ("w8a8", "int4"))
        scheme, least_bytes = next(((name, size) for name, size in sizes if size < free_bytes), ("", free_bytes))
        if scheme and scheme in shape.stored:
            hint = f"set quantize to {scheme}, in which they take {_gib(least_bytes)}, or {hint}"
    scheme = f" with quantize {quantize}" if quantize else ""
    return DeviceMemoryError(
        f"the weights, {shape.num_parameters / 1e9:.2f} billion parameters in {dtype}{scheme}, take "
        f"{_gib(shape.weights_bytes(device, dtype, quantize))}; {place} has {_gib(free_bytes)} of memory free.",
        hint=hint,
    )


def device_facts(shape: Shape, device: str, settings: Settings) -> Facts:
    """The facts of this machine's cpu, cuda or null device. Raises SettingError if it has no such device."""
    if device != "cuda":
        return facts_of(shape, device, dtype=settings.dtype, quantize=settings.quantize)
    import torch

    if not torch.cuda.is_available():
        raise SettingError("device is cuda, but PyTorch finds no CUDA device.", hint="use --device cpu.")
    free_bytes, _ = torch.cuda.mem_get_info()
    free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # kept by this process, and unused
    return facts_of(shape, device, torch.cuda.get_device_name(), free_bytes, settings.dtype)


def estimate_max_batch_tokens(resolved: Resolved, shape: Shape) -> int:
    """The largest token budget that the memory allows, in tokens; 0 if the weights alone fill it.

    max_batch_tokens ≈ (memory × utilisation − parameters × bytes) / (2 × layers × kv_heads × head_dim × bytes)

    that is, the memory that the weights leave free, over the bytes of one token in the KV cache. memory is what was
    free before the weights were loaded, bytes those of one element; quantised weights count as they are stored.
    Activations are left out: it is an upper bound.
    """
    settings, facts = resolved.settings, resolved.facts
    each = DTYPE_BYTES[settings.dtype or "float32"]
    weights_bytes = shape.weights_bytes(facts.device, settings.dtype or "float32", settings.quantize)
    memory_bytes = facts.free_bytes + weights_bytes
    free_bytes = int(memory_bytes * settings.gpu_memory_utilization) - weights_bytes
    return max(0, free_bytes // (shape.kv_elements_per_token * each))


def block_bytes_of(settings: Settings, shape: Shape) -> int:
    """Bytes of one KV block: block_size · 2 · layers · KV heads · head dimension · bytes of an element."""
    return settings.block_size * shape.kv_elements_per_token * DTYPE_BYTES[settings.dtype or "float32"]


def fit_cache(resolved: Resolved, shape: Shape) -> Resolved:
    """Before the runner is built: no more cache than all rows together can fill, and enough for one request.

    Raises DeviceMemoryError, as fit_length, and if more was asked for than the host has free.
    """
    settings = resolved.settings
    _check_host(resolved)
    block_bytes = block_bytes_of(settings, shape)
    num_blocks = (settings.kv_cache_memory or 0) // block_bytes
    resolved = fit_length(resolved, num_blocks, block_bytes)
    settings = resolved.settings
    # a request enters only while a block for each that runs is left over, to grow into: hence one more a row
    useful = (settings.max_num_seqs or 1) * (1 - (-(settings.max_model_len or 1) // settings.block_size))
    if resolved.reasons["kv_cache_memory"] == "asked" or num_blocks <= useful:
        return resolved
    return change(resolved, "kv_cache_memory", useful * block_bytes, "max_num_seqs requests of max_model_len")


def _check_host(resolved: Resolved) -> None:
    asked, free_bytes = resolved.settings.kv_cache_memory or 0, resolved.facts.free_bytes
    if resolved.facts.device == "cpu" and resolved.reasons["kv_cache_memory"] == "asked" and asked > free_bytes:
        raise DeviceMemoryError(
            f"kv_cache_memory is {asked} bytes ({_gib(asked)}); beside the weights {free_bytes} bytes "
            f"({_gib(free_bytes)}) of the machine's memory are free.",
            hint=f"set kv_cache_memory to at most {free_bytes}, or leave it out: then it is chosen to fit.",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def fit_length(resolved: Resolved, num_blocks: int, block_bytes: int | None = None) -> Resolved:
    """Make sure that one request of max_model_len fits into num_blocks.

    Lowers max_model_len, with a reason, if nobody asked for it. Raises DeviceMemoryError if somebody did, or if there
    is no block at all.
    """
    settings = resolved.settings
    wanted, capacity = settings.max_model_len or 1, num_blocks * settings.block_size
    if capacity >= wanted:
        return resolved
    if num_blocks == 0 or resolved.reasons["max_model_len"] == "asked":
        free_bytes = resolved.facts.free_bytes
        beside = f" Beside the weights {_gib(free_bytes)} are free." if block_bytes else ""
        raise DeviceMemoryError(
            f"the KV cache holds {num_blocks} blocks, {capacity} tokens; max_model_len is {wanted}.{beside}",
            hint=_what_fits(resolved, capacity, block_bytes),
        )
    return change(resolved, "max_model_len", capacity, f"what the KV cache holds; the model's context is {wanted}")


def _what_fits(resolved: Resolved, capacity: int, block_bytes: int | None) -> str:
    """What to change so that a request of max_model_len fits; only figures that the free memory has."""
    settings, facts = resolved.settings, resolved.facts
    needed = -(-(settings.max_model_len or 1) // settings.block_size)
    lower = f"lower max_model_len to {capacity}" if capacity else ""
    if block_bytes is None:
        if resolved.reasons["kv_cache_memory"] == "asked":
            more = f"set kv_cache_memory to what {needed} blocks take"
        else:
            more = f"raise gpu_memory_utilization, {settings.gpu_memory_utilization}"
    else:
        most = facts.free_bytes // block_bytes
        more = f"set kv_cache_memory to at least {needed * block_bytes}" if needed <= most else ""
        if not more and most * settings.block_size > capacity:
            larger = f"set kv_cache_memory to {most * block_bytes} and max_model_len to {most * settings.block_size}"
            more = f"{larger}, the most that fits"
    if more or lower:
        return ", or ".join(part for part in (more, lower) if part) + "."
    half = "a dtype of fewer bytes, " if DTYPE_BYTES[settings.dtype or "float32"] > 2 else ""
    return (
        f"a block of {settings.block_size} tokens takes {block_bytes} bytes: take {half}a smaller model or block_size."
    )


def change(resolved: Resolved, name: str, value: Any, reason: str) -> Resolved:
    """The same, with another value and reason for one setting."""
    settings = dataclasses.replace(resolved.settings, **{name: value})
    return dataclasses.replace(resolved, settings=settings, reasons={**resolved.reasons, name: reason})


def banner(name: str, resolved: Resolved, shape: Shape, facts: RunnerFacts) -> list[str]:
    """Lines for people at start: the settings with their reasons, the model, the cache, the runner's notes."""
    found, block_size = resolved.facts, resolved.settings.block_size
    tokens = facts.num_blocks * block_size
    return [
        *resolved.lines(),
        f"{'model':<24} {name}, {found.num_parameters / 1e6:,.1f} M parameters",
        f"{'machine':<24} {found.device_name}, {found.cores} cores, {found.free_bytes / 2**30:.1f} GiB free",
        f"{'KV cache':<24} {facts.num_blocks:,} blocks of {block_size}, {tokens:,} tokens",
        f"{'largest token budget':<24} about {estimate_max_batch_tokens(resolved, shape):,} tokens by memory",
        *(f"{'note':<24} {note}" for note in facts.notes),
    ]


def num_known_ids(tokenizer_json: str | None) -> int | None:
    """One more than the largest id that a tokenizer.json knows; ids above are padding of the output matrix."""
    if tokenizer_json is None:
        return None
    document = json.loads(tokenizer_json)
    vocabulary = document["model"].get("vocab", {})
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    added = [int(token["id"]) for token in document.get("added_tokens") or []]
    return 1 + max(int(largest), *added, -1)


def free_host_bytes() -> int:
    """Host memory that can be had without swapping: /proc/meminfo, or the control group's limit if that is less."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            left = int(limit.read()) - int(used.read())
        with open("/sys/fs/cgroup/memory.stat") as file:
            left += int(dict(line.split() for line in file)["inactive_file"])  # cached files count as used, and yield
        return max(0, min(free, left))
    except (OSError, ValueError, KeyError):  # no limit ("max"), or no such file
        return free


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_name() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
