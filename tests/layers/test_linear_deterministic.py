"""Deterministic where it holds, and refused where it does not."""

import pytest
import torch

from tandem.errors import SettingError
from tandem.layers.linear import linear_scheme


@pytest.mark.parametrize(
    ("device", "dtype", "word"), [("meta", torch.float32, "bfloat16"), ("cpu", torch.float16, "float32")]
)
def test_a_dtype_whose_products_depend_on_the_batch_is_refused(device, dtype, word):
    place = torch.device(device)
    scheme = linear_scheme(None, place, True)
    with pytest.raises(SettingError, match=f"set dtype to {word}"):
        scheme.create(8, (8,), False, dtype, place)
    linear_scheme(None, place).create(8, (8,), False, dtype, place)
    scheme.create(8, (8,), False, getattr(torch, word), place)


def test_a_cpu_without_packed_products_is_refused(monkeypatch):
    monkeypatch.setattr("tandem.layers.packed.can_pack", lambda *_: False)
    place = torch.device("cpu")
    with pytest.raises(SettingError, match="oneDNN"):
        linear_scheme(None, place, True).create(8, (8,), False, torch.float32, place)
    linear_scheme(None, place).create(8, (8,), False, torch.float32, place)


@pytest.mark.parametrize("name", ["w8a8", "int4"])
def test_quantised_products_are_refused(name):
    with pytest.raises(SettingError, match=f"quantize {name}"):
        linear_scheme(name, torch.device("cpu"), True)
