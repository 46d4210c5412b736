"""Rotary position embedding (Su et al. 2021): the variants, their settings and their tables.

It knows the settings' spellings in config.json; it does not know models. Every variant is a function of the position
alone, so that chunks, cached prefixes and neighbours cannot change a token's angles.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding. trained_length: max_position_embeddings; original_length: before llama3 or yarn.

    magnitude is yarn's factor on cosines and sines (its "attention factor").
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    trained_length: int = 2048
    factor: float = 1.0
    original_length: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0

    @property
    def context_length(self) -> int:
        """Positions the variant reaches: scaled by linear and dynamic, from the original length by yarn."""
        if self.kind in ("linear", "dynamic"):
            return int(self.trained_length * self.factor)
        if self.kind == "yarn":
            return int(self.original_length * self.factor)
        return self.trained_length


def rope_from_config(
    settings: Mapping[str, Any] | None, *, head_dim: int, theta: float, trained_length: int,
    original_length: int | None = None,
) -> RopeSpec:  # fmt: skip
    """Read one rope_scaling or rope_parameters block (flat; `rope_type` or the older `type`; None: default).

    theta and original_length are the model's own, used where the block has none. Raises ModelError, naming what is
    unknown or missing.
    """
    given = dict(settings or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"rope type {kind!r} is not supported.", hint=f"the supported types are: {', '.join(KINDS)}.")
    if given.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor is {given['partial_rotary_factor']}; only whole heads are supported.")
    spec: dict[str, Any] = {
        "head_dim": head_dim,
        "theta": _number(given, kind, "rope_theta", theta),
        "kind": kind,
        "trained_length": trained_length,
    }
    if kind == "default":
        return RopeSpec(**spec)
    original = int(_number(given, kind, "original_max_position_embeddings", original_length or trained_length))
    if kind == "yarn" and "factor" in given and given["factor"] is None:
        given["factor"] = trained_length / original
    factor = _number(given, kind, "factor")
    if factor < 1.0:
        raise ModelError(f"the rope setting 'factor' is {factor}; for type {kind!r} it must be at least 1.")
    spec |= {"factor": factor, "original_length": original}
    if kind == "llama3":
        spec |= {name: _number(given, kind, name) for name in ("low_freq_factor", "high_freq_factor")}
        if spec["high_freq_factor"] <= spec["low_freq_factor"]:
            raise ModelError("the rope setting 'high_freq_factor' must be greater than 'low_freq_factor'.")
    if kind == "yarn":
        spec |= {
            "beta_fast": _number(given, kind, "beta_fast", 32.0),
            "beta_slow": _number(given, kind, "beta_slow", 1.0),
        }
        spec |= {"truncate": bool(given.get("truncate", True)), "magnitude": _yarn_magnitude(given, factor)}
    return RopeSpec(**spec)


def _number(given: Mapping[str, Any], kind: str, name: str, default: float | None = None) -> float:
    value = given.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"the rope setting {name!r} is missing; type {kind!r} needs it.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"the rope setting {name!r} is {value!r}; it must be a number.")
    return float(value)


def _yarn_magnitude(given: Mapping[str, Any], factor: float) -> float:
    """Peng et al. 2023, eq. 22: 0.1·ln(factor) + 1, or the ratio of two of them where the model says so."""
    if given.get("attention_factor") is not None:
        return _number(given, "yarn", "attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(float(given["mscale"])) / scale(float(given["mscale_all_dim"]))
    return scale(1.0)


def frequencies(spec: RopeSpec, length: int) -> Tensor:
    """Angles a position, float32: [D/2], or [length, D/2] where they depend on the position (dynamic)."""
    exponents_d = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    if spec.kind == "dynamic":
        return _dynamic(spec, exponents_d, length)
    plain_d = 1.0 / spec.theta**exponents_d
    if spec.kind == "linear":
        return plain_d / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain_d)
    if spec.kind == "yarn":
        return _yarn(spec, plain_d)
    return plain_d


def _dynamic(spec: RopeSpec, exponents_d: Tensor, length: int) -> Tensor:
    """NTK-aware scaling of the base (bloc97, emozilla 2023) by the sequence length at which a position appears."""
    lengths_L = torch.arange(1, length + 1, dtype=torch.float32).clamp(min=spec.trained_length)
    growth_L = spec.factor * lengths_L / spec.trained_length - (spec.factor - 1.0)
    # The power in float64, then rounded: a vectorised float32 one is off by a unit here and there.
    bases_L = spec.theta * (growth_L.double() ** (spec.head_dim / (spec.head_dim - 2))).float()
    return 1.0 / bases_L[:, None] ** exponents_d


def _llama3(spec: RopeSpec, plain_d: Tensor) -> Tensor:
    """Long waves divided by factor, short ones kept, a linear blend between (Llama 3.1's reference code)."""
    wavelengths_d = 2 * math.pi / plain_d
    low, high = spec.low_freq_factor, spec.high_freq_factor
    blend_d = ((spec.original_length / wavelengths_d - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend_d) * plain_d / spec.factor + blend_d * plain_d


def _yarn(spec: RopeSpec, plain_d: Tensor) -> Tensor:
    """Peng et al. 2023: interpolate the slow dimensions, keep the fast, ramp between beta_slow and beta_fast turns."""

    def dimension(turns: float) -> float:
        return spec.head_dim * math.log(spec.original_length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    steps_d = torch.arange(len(plain_d), dtype=torch.float32)
    ramp_d = ((steps_d - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return plain_d / spec.factor * ramp_d + plain_d * (1.0 - ramp_d)


def cos_sin_table(spec: RopeSpec, length: int, device: torch.device) -> Tensor:
    """float32 [length, D]: D/2 cosines, then D/2 sines, of each position, times the magnitude."""
    positions_L = torch.arange(length, dtype=torch.float32)
    angles_Ld = positions_L[:, None] * frequencies(spec, length)
    return (torch.cat((angles_Ld.cos(), angles_Ld.sin()), dim=-1) * spec.magnitude).to(device)
