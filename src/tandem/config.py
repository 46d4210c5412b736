"""Every setting of the engine, in one frozen table. It knows what they mean, not who obeys them.

``Settings`` holds what the user said, with None for "auto" (the word "auto" means None, too). ``resolve(facts)`` makes
a ``Resolved`` in which each setting has a value and a reason; it is printed at start and stored with each benchmark.
The command line's options are derived from the fields and their metadata.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import SettingError

DEPTHS = (1, 2, 3, 4)
AUTO = "auto"
KIND_TEXTS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "True or False"}
GROUPS = ("model", "batching", "memory", "execution")


def _setting(default: Any, group: str, text: str, **limits: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": text, **limits})


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. None means "auto": resolved from the model and the machine at start.

    Each setting whose default is None takes the word "auto" for it as well (so a file called auto is ./auto).
    """

    model: str | None = _setting(
        None,
        "model",
        "a Hugging Face id, a folder, a .gguf file, or a built-in shape; default: the embedded SmolLM2",
        unit="model",
    )
    load_format: str = _setting(
        "auto", "model", "where weights come from", choices=("auto", "safetensors", "gguf", "random")
    )
    tokenizer: str | None = _setting(
        None, "model", "a folder or tokenizer.json to use instead of the model's own", unit="path"
    )
    chat_template: str | None = _setting(
        None, "model", "a file with a Jinja chat template to use instead of the model's", unit="file"
    )
    dtype: str | None = _setting(
        None, "model", "arithmetic of weights and cache", choices=("float32", "bfloat16", "float16")
    )
    quantize: str | None = _setting(None, "model", "faster, lossy linear layers on the CPU", choices=("w8a8", "int4"))
    max_model_len: int | None = _setting(None, "model", "longest prompt plus answer, in tokens", low=1)

    max_num_seqs: int | None = _setting(None, "batching", "most requests in one step", low=1, high=8192)
    max_batch_tokens: int | None = _setting(None, "batching", "most tokens in one step", low=1)
    target_step_ms: float | None = _setting(
        None, "batching", "prompts are cut so that a step beside running answers takes so long at most; 0: never",
        low=0, high=60_000, unit="ms",
    )  # fmt: skip
    policy: str = _setting("fcfs", "batching", "who goes first", choices=("fcfs", "priority"))
    prefix_cache: bool = _setting(True, "batching", "reuse the KV cache of equal prompt beginnings")
    max_waiting: int = _setting(65536, "batching", "most requests that may wait; more are refused", low=1)
    max_new_grammars: int = _setting(
        128, "batching", "most new grammars in line to be compiled; a request with one more is refused", low=1
    )

    kv_cache_memory: int | None = _setting(
        None, "memory", "bytes for the KV cache, as 4GiB or 500MB; default: what is free", unit="bytes", low=1
    )
    gpu_memory_utilization: float = _setting(
        0.9, "memory", "share of device memory to use", unit="share", low=0.05, high=0.99
    )
    block_size: int = _setting(16, "memory", "tokens in a KV block", low=1, high=1024)

    device: str | None = _setting(None, "execution", "where to run", choices=("cpu", "cuda", "null"))
    depth: int = _setting(2, "execution", "steps in flight: 1 synchronous, 2 tandem", low=1, high=4)
    cuda_graphs: bool = _setting(True, "execution", "capture decode steps as CUDA graphs")
    attention: str | None = _setting(
        None, "execution", "attention backend", choices=("reference", "cpu", "triton", "flashinfer")
    )
    deterministic: bool = _setting(
        False,
        "execution",
        "same tokens whatever the neighbours: bfloat16 or float16 on cuda, float32 on cpu (there log-probabilities "
        "may differ by rounding if a prompt is cut otherwise)",
    )
    threads: int | None = _setting(None, "execution", "CPU threads for the arithmetic", low=1, high=1024)
    seed: int = _setting(0, "execution", "seed for requests that bring none, and for random weights")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if f.default is None and getattr(self, f.name) == AUTO:
                object.__setattr__(self, f.name, None)
            _check(f, getattr(self, f.name))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """Build from names and values; an unknown name is refused with the nearest spelling."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the settings are: {', '.join(known)}."
                raise SettingError(f"there is no setting {name!r}.", hint=hint)
        return cls(**{name: _coerce(name, value) for name, value in values.items()})

    def resolve(self, facts: "Facts", offline: bool = False) -> "Resolved":
        """Give each "auto" a value and a reason. offline: all answers are waited for together, nobody reads along."""
        chosen: dict[str, tuple[Any, str]] = {}
        cuda, dense = facts.device == "cuda", facts.model_dtype or "float32"
        chosen["device"] = (facts.device, "asked" if self.device else "the best device found")
        chosen["dtype"] = (
            (dense, "the model's own") if cuda else ("float32", "exact, and the fastest on most CPUs for prefill")
        )
        chosen["max_model_len"] = (facts.context_length, "the model's context length")
        seqs = {"cuda": 256, "null": 256}.get(facts.device, 32)
        if self.max_batch_tokens is not None:
            seqs = min(seqs, self.max_batch_tokens)
        chosen["max_num_seqs"] = (seqs, f"the default on {facts.device}")
        budget = {"cuda": 8192, "null": 8192}.get(facts.device, 1024 if offline else 512)
        chosen["max_batch_tokens"] = (
            max(budget, self.max_num_seqs or seqs), f"the default on {facts.device}, at least one token a sequence"
        )  # fmt: skip
        target = 200.0, "the default on cpu: a long prompt must not hold running answers up"
        if facts.device != "cpu":
            target = 0.0, f"off on {facts.device}: max_batch_tokens is quick there"
        elif offline:
            target = 0.0, "off offline: nobody reads along"
        chosen["target_step_ms"] = target
        memory = int(facts.free_bytes * self.gpu_memory_utilization) if cuda else min(facts.free_bytes // 4, 4 << 30)
        chosen["kv_cache_memory"] = (
            memory, "share of the device's free memory" if cuda else "a quarter of free memory, at most 4 GiB"
        )  # fmt: skip
        own = "the default on cuda; FlashInfer has the prompts where it is installed and can"
        chosen["attention"] = ("triton", own) if cuda else ("cpu", f"the default on {facts.device}")
        chosen["threads"] = (facts.cores, "one a core")
        values: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for f in dataclasses.fields(self):
            asked = getattr(self, f.name)
            if asked is None and f.name in chosen:
                values[f.name], reasons[f.name] = chosen[f.name]
            else:
                values[f.name] = asked
                reasons[f.name] = "default" if asked == f.default else "asked"
        if values["max_batch_tokens"] < values["max_num_seqs"]:
            raise SettingError(
                f"max_batch_tokens is {values['max_batch_tokens']}, less than max_num_seqs, {values['max_num_seqs']}; "
                "each running sequence needs a token a step.",
                hint=f"set max_num_seqs to at most {values['max_batch_tokens']}.",
            )
        if values["max_model_len"] > facts.context_length:
            raise SettingError(
                f"max_model_len is {values['max_model_len']}; the model's context is {facts.context_length}.",
                hint="lower max_model_len.",
            )
        return Resolved(settings=Settings(**values), reasons=reasons, facts=facts)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model and the machine say, for resolve().

    free_bytes      memory that weights have left free (device memory on cuda, else host memory).
    model_dtype     dtype the weights are stored in, or None.
    """

    device: str
    device_name: str
    cores: int
    free_bytes: int
    context_length: int
    num_parameters: int
    kv_bytes_per_token: int
    model_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings without "auto", the reason for each, and the facts they came from."""

    settings: Settings
    reasons: dict[str, str]
    facts: Facts

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "reasons": dict(self.reasons),
            "facts": dataclasses.asdict(self.facts),
        }

    def lines(self) -> list[str]:
        """One line a setting, for people."""
        pairs = [(f.name, getattr(self.settings, f.name)) for f in dataclasses.fields(self.settings)]
        return [f"{name:<24} {_show(name, value):<20} {self.reasons[name]}" for name, value in pairs]


def parse_bytes(text: str) -> int:
    """'4GiB' → 4294967296, '500MB' → 500000000, '1024' → 1024. Raises SettingError."""
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    units |= {f"{k}ib": 1 << s for k, s in (("k", 10), ("m", 20), ("g", 30), ("t", 40))}
    units |= {f"{k}b": 10**s for k, s in (("k", 3), ("m", 6), ("g", 9), ("t", 12))}
    stripped = text.strip().lower().replace(" ", "")
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        size = float(number) * units[stripped[len(number) :]]
        return int(size)
    except (ValueError, KeyError, OverflowError) as error:
        raise SettingError(f"{text!r} is no size in bytes.", hint="write it as 4GiB, 500MB or 1048576.") from error


def _show(name: str, value: Any) -> str:
    if name == "kv_cache_memory" and isinstance(value, int):
        return f"{value / (1 << 30):.2f} GiB"
    return "-" if value is None else str(value)


def _coerce(name: str, value: Any) -> Any:
    metadata = Settings.__dataclass_fields__[name].metadata
    if metadata.get("unit") == "bytes" and isinstance(value, str) and value != AUTO:
        return parse_bytes(value)
    return value


def _check(f: "dataclasses.Field[Any]", value: Any) -> None:
    if value is None:
        if f.default is not None:
            raise SettingError(f"{f.name} may not be None.")
        return
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
    kind = str(getattr(f.type, "__name__", f.type)).split(" ")[0]
    wanted = kinds[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):  # type: ignore[arg-type]
        raise SettingError(f"{f.name} is {value!r}; it must be {KIND_TEXTS[kind]}.")
    if value == "":
        raise SettingError(f"{f.name} is empty.", hint="leave it out for the default, or give it a value.")
    choices, low, high = (f.metadata.get(key) for key in ("choices", "low", "high"))
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        raise SettingError(
            f"{f.name} is {value!r}; it must be one of {', '.join(choices)}.",
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    if (low is not None and not value >= low) or (high is not None and not value <= high):  # NaN is in no range
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise SettingError(f"{f.name} is {value!r}; it must be {bounds}.")
