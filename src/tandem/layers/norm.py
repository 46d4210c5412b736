"""Weights of root-mean-square norms. The arithmetic is in kernels/norm.py; this knows only their storage."""

import torch
from torch import nn


def norm_weight(size: int, device: torch.device) -> nn.Parameter:
    """A norm's weight, float32 whatever the model's dtype: Gemma's 1 + weight does not survive bfloat16."""
    return nn.Parameter(torch.empty(size, dtype=torch.float32, device=device), requires_grad=False)
