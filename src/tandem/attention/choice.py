"""Picks an attention backend by name and device. It knows the names; each backend is imported only when chosen."""

import logging
from typing import TYPE_CHECKING

from tandem.attention.contract import AttentionBackend
from tandem.errors import SettingError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("tandem.attention")


def attention_backend(
    name: str | None, device: str, *, deterministic: bool = False, dtype: "torch.dtype | None" = None,
    head_dim: int | None = None,
) -> AttentionBackend:  # fmt: skip
    """The backend of a name; None: the default of the device ("cpu", "cuda"). Raises SettingError.

    deterministic    a token's result depends on its own request alone; on the CPU, on how its prompt was cut, too.
    dtype, head_dim  of the model's cache. If they are given, the default on CUDA is our kernels with FlashInfer's
                     prefill where that is installed, ready to run, and able to.
    """
    if name == "reference":
        from tandem.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "cpu" or (name is None and not device.startswith("cuda")):
        if device != "cpu":
            raise SettingError(f"the attention backend 'cpu' cannot run on {device}.", hint="use 'triton'.")
        from tandem.attention.cpu import CpuAttention

        return CpuAttention(deterministic)
    if name in (None, "triton", "flashinfer"):
        if not device.startswith("cuda"):
            raise SettingError(f"the attention backend {name!r} cannot run on {device}.", hint="use 'cpu'.")
        return _on_cuda(name, device, deterministic, dtype, head_dim)
    raise SettingError(
        f"there is no attention backend {name!r} for {device}.",
        hint="the backends are: reference, cpu, triton, flashinfer.",
    )


def _on_cuda(
    name: str | None, device: str, deterministic: bool, dtype: "torch.dtype | None", head_dim: int | None
) -> AttentionBackend:
    import torch

    from tandem.attention.flashinfer_module import UnavailableError, is_installed
    from tandem.attention.triton import TritonAttention

    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    if name == "flashinfer" or (name is None and dtype is not None and not deterministic and is_installed()):
        from tandem.attention.flashinfer import flashinfer_attention

        try:
            return flashinfer_attention(place, dtype, head_dim, deterministic=deterministic, builds=name is not None)
        except UnavailableError as error:
            if name is not None:
                raise SettingError(
                    f"the attention backend 'flashinfer' cannot be used: {error}.", hint=error.hint
                ) from error
            log.warning("FlashInfer is installed but left alone: %s (%s)", error, error.hint)
    return TritonAttention(place, deterministic)
