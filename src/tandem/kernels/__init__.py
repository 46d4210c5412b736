"""Triton kernels, each beside its plain torch twin. Functions here pick by device; twins end in ``_torch``.

The functions linear.linear and sample.sample are taken from their modules, whose names they share.
"""

from tandem.kernels.activation import gated, gelu_tanh_mul, silu_mul
from tandem.kernels.grouped import combine, gated_grouped, grouped
from tandem.kernels.linear import add_parts, gated_linear, linear_parts
from tandem.kernels.norm import add_rms_norm, rms_norm
from tandem.kernels.rotary import norm_rope_store
from tandem.kernels.route import route
from tandem.kernels.sample import greedy

__all__ = [
    "add_parts", "add_rms_norm", "combine", "gated", "gated_grouped", "gated_linear", "gelu_tanh_mul", "greedy",
    "grouped", "linear_parts", "norm_rope_store", "rms_norm", "route", "silu_mul",
]  # fmt: skip
