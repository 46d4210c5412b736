"""Fills a module from a model source: every parameter exactly once. It knows names and shapes, not what they compute.

The module is duck-typed, so that this room needs no other:
    targets() -> {checkpoint name: Target}    what must be written
    ignored(name) -> bool                     stored tensors that the model does not want
    spec.tied                                 whether the head is the embedding
    Target.shape, Target.write(tensor)        as in the checkpoint; write copies, casts and shards
    Target.device, Target.randomize(generator, std)   both optional, for random weights
"""

import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.errors import WeightsError
from tandem.weights.quantised import dense_stored
from tandem.weights.shards import folder_stored
from tandem.weights.source import ModelSource
from tandem.weights.stored import Stored

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Where multimodal checkpoints keep their text model: (their prefix, the plain one).
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_RANDOM_STD = 0.02


class Target(Protocol):
    shape: tuple[int, ...]

    def write(self, tensor: Tensor) -> None: ...


class Module(Protocol):
    spec: Any

    def targets(self) -> Mapping[str, Target]: ...

    def ignored(self, name: str) -> bool: ...


@dataclass(frozen=True)
class LoadReport:
    """What was loaded. dtype is the one that most stored bytes have, or "random"; seconds are wall-clock."""

    num_tensors: int
    num_parameters: int
    num_bytes: int
    seconds_s: float
    dtype: str
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass
class _Fitting:
    """Which stored tensor goes to which targets, settled before anything is read."""

    pairs: list[tuple[Stored, list[Target]]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def load(module: Module, source: ModelSource, *, seed: int = 0, on_progress: Progress | None = None) -> LoadReport:
    """Write every target of the module exactly once.

    on_progress  called with (bytes done, bytes in all) after each tensor.
    Peak memory is the parameters plus one tensor (in float32 when it was quantised).
    Raises WeightsError, naming the tensors, when some are missing, left over or ill-shaped; nothing is written then.
    """
    started = time.perf_counter()
    targets = dict(module.targets())
    if source.kind == "random":
        return _randomise(targets, _device_of(module), seed, on_progress, started)
    prefix = getattr(module.spec, "tensor_prefix", "")
    fitting = _fit(
        {_plain(name): target for name, target in targets.items()},
        _stored_of(source),
        lambda name: any(module.ignored(n) for n in (name, prefix + name, name.removeprefix("model."))),
        bool(module.spec.tied),
    )
    total = sum(stored.num_bytes for stored, _ in fitting.pairs)
    done, kinds = 0, Counter[str]()
    for stored, into in fitting.pairs:
        tensor = stored.read()
        for target in into:
            target.write(tensor)
        del tensor
        stored.release()
        done += stored.num_bytes
        kinds[stored.dtype] += stored.num_bytes
        if on_progress:
            on_progress(done, total)
    for text in fitting.warnings:
        log.warning(text)
    return LoadReport(
        num_tensors=len(fitting.pairs),
        num_parameters=sum(_count(stored.shape) for stored, _ in fitting.pairs),
        num_bytes=total,
        seconds_s=time.perf_counter() - started,
        dtype=kinds.most_common(1)[0][0] if kinds else "none",
        ignored=tuple(fitting.ignored),
        warnings=tuple(fitting.warnings),
    )


def _stored_of(source: ModelSource) -> list[Stored]:
    assert source.path is not None, "only random sources have no path"
    if source.kind == "gguf":
        from tandem.weights.gguf import read_gguf
        from tandem.weights.gguf_tensors import gguf_stored

        return list(gguf_stored(read_gguf(source.path)))
    return dense_stored(_plain_names(folder_stored(source.path)), source.quantization)


def _plain(name: str) -> str:
    for theirs, plain in _PREFIXES:
        if name.startswith(theirs):
            return plain + name.removeprefix(theirs)
    return name


def _plain_names(stored: list[Stored]) -> list[Stored]:
    """Text models inside multimodal checkpoints, and checkpoints of the bare decoder, under the usual names."""
    bare = any(tensor.name == EMBEDDING.removeprefix("model.") for tensor in stored)
    prefix = "model." if bare else ""
    return [
        dataclasses.replace(tensor, name=_plain(tensor.name if tensor.name == HEAD else prefix + tensor.name))
        for tensor in stored
    ]


def _fit(targets: Mapping[str, Target], stored: list[Stored], ignored: Callable[[str], bool], tied: bool) -> _Fitting:
    fitting, by_name = _Fitting(), {tensor.name: tensor for tensor in stored}
    if len(by_name) < len(stored):
        twice = [name for name, count in Counter(tensor.name for tensor in stored).items() if count > 1]
        raise WeightsError(f"the checkpoint has the tensor {twice[0]!r} twice.")
    if tied:
        _drop_head(by_name, fitting)
    missing = [name for name in targets if name not in by_name and not (tied and name == HEAD)]
    left_over = []
    for name, tensor in by_name.items():
        if name in targets:
            into = [targets[name]]
            if tied and name == EMBEDDING and HEAD in targets:
                into.append(targets[HEAD])
            fitting.pairs.append((tensor, into))
        elif ignored(name) or name.endswith("rotary_emb.inv_freq"):
            fitting.ignored.append(name)
        else:
            left_over.append(name)
    _refuse(missing, left_over, fitting.pairs)
    return fitting


def _drop_head(by_name: dict[str, Stored], fitting: _Fitting) -> None:
    """With tied embeddings the embedding is the head; a stored head that differs is reported and not used."""
    head, embedding = by_name.pop(HEAD, None), by_name.get(EMBEDDING)
    if head is None or embedding is None:
        return
    if head.shape != embedding.shape or not torch.equal(head.read(), embedding.read()):
        fitting.warnings.append(
            f"the model ties its head to the embedding, but the checkpoint has another {HEAD}; the embedding is used."
        )
    head.release()
    embedding.release()
    fitting.ignored.append(HEAD)


def _refuse(missing: list[str], left_over: list[str], pairs: list[tuple[Stored, list[Target]]]) -> None:
    wrong = [
        f"{tensor.name} is {list(tensor.shape)}, not {list(target.shape)}"
        for tensor, into in pairs
        for target in into
        if tuple(target.shape) != tuple(tensor.shape)
    ]
    odd = [f"{tensor.name} is {tensor.dtype}" for tensor, _ in pairs if tensor.dtype in _NO_NUMBERS]
    parts = [
        f"{what} ({len(names)}): {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
        for what, names in (
            ("missing", missing),
            ("left over", left_over),
            ("ill-shaped", wrong),
            ("of a type that needs a scale or is no floating point", odd),
        )
        if names
    ]
    if parts:
        raise WeightsError(
            "the checkpoint does not fit the model; " + "; ".join(parts) + ".",
            hint="is config.json the one that belongs to these weights?",
        )


_NO_NUMBERS = ("F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")


def _device_of(module: Any) -> torch.device:
    first = next(iter(module.parameters()), None) if hasattr(module, "parameters") else None
    return torch.device("cpu") if first is None else first.device


def _randomise(
    targets: Mapping[str, Target], device: torch.device, seed: int, on_progress: Progress | None, started: float
) -> LoadReport:
    """Normal values of standard deviation 0.02, norms 1: a residual stream that stays finite at any depth.

    Each tensor has a generator of its own from seed and name, so that order and sharding do not matter. Values are
    made on the module's device: on a GPU that takes seconds where a CPU takes minutes.
    """
    sizes = {name: _count(target.shape) for name, target in targets.items()}
    total, done = sum(sizes.values()), 0
    for name, target in targets.items():
        device = torch.device(getattr(target, "device", device))
        if len(target.shape) == 1 and "norm" in name:
            target.write(torch.ones(target.shape, device=device))
        else:
            generator = torch.Generator(device)
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            if hasattr(target, "randomize"):
                target.randomize(generator, _RANDOM_STD)
            else:
                values = torch.empty(target.shape, device=device)
                target.write(values.normal_(0.0, _RANDOM_STD, generator=generator))
        done += sizes[name]
        if on_progress:
            on_progress(done, total)
    return LoadReport(len(targets), total, 0, time.perf_counter() - started, "random")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
