"""Picks an attention backend by name and device. It knows the names; each backend is imported only when chosen."""

from tandem.attention.contract import AttentionBackend
from tandem.errors import SettingError


def attention_backend(name: str | None, device: str, *, deterministic: bool = False) -> AttentionBackend:
    """The backend of a name; None: the default of the device ("cpu", "cuda"). Raises SettingError.

    deterministic  a token's result depends on its own request alone. The CPU's agree to rounding only.
    """
    name = name or ("triton" if device.startswith("cuda") else "cpu")
    if name == "reference":
        from tandem.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "cpu":
        if device != "cpu":
            raise SettingError(f"the attention backend 'cpu' cannot run on {device}.", hint="use 'triton'.")
        from tandem.attention.cpu import CpuAttention

        return CpuAttention()
    if name == "triton":
        if not device.startswith("cuda"):
            raise SettingError(f"the attention backend 'triton' cannot run on {device}.", hint="use 'cpu'.")
        import torch

        from tandem.attention.triton import TritonAttention

        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        return TritonAttention(place, deterministic)
    raise SettingError(
        f"there is no attention backend {name!r} for {device}.", hint="the backends are: reference, cpu, triton."
    )
