"""Triton kernels, each beside its plain torch twin. Functions here pick by device; twins end in ``_torch``."""

from tandem.kernels.activation import gelu_tanh_mul, silu_mul
from tandem.kernels.norm import add_rms_norm, rms_norm
from tandem.kernels.rotary import norm_rope_store

__all__ = ["add_rms_norm", "gelu_tanh_mul", "norm_rope_store", "rms_norm", "silu_mul"]
