"""Kernels are sent to be compiled before the device is opened, and not for longer than the start takes."""

import pytest

from tandem.engine.build import build
from tandem.errors import SettingError


@pytest.mark.parametrize("device", ["cuda", None])
def test_compiling_begins_before_the_device_is_opened_and_ends_with_the_start(monkeypatch, device):
    import torch

    from tandem.runner import variants

    told = []

    class Compiling:
        def close(self):
            told.append("closed")

    def start(spec, settings, num_tokens):
        told.append((spec.num_layers, settings.max_num_seqs, settings.max_batch_tokens, settings.dtype))
        return Compiling()

    def open_device():
        told.append("opened")
        raise SettingError("no device")

    monkeypatch.setattr(variants, "start_compiling", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", open_device)
    with pytest.raises(SettingError, match="no device"):
        build({"model": "qwen3-0.6b", "load_format": "random", "device": device, "max_model_len": 2048})
    assert told == [(28, 256, 8192, "bfloat16"), "opened", "closed"]
