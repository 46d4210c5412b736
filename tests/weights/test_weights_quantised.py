"""Quantised checkpoints (C31): packed here from known integers, unpacked by the room, compared with the formula."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import RecordingModule, write_folder
from torch import Tensor

from tandem.errors import WeightsError
from tandem.weights.load import load
from tandem.weights.quantised import zero_offset
from tandem.weights.source import locate

STEM = "model.layers.0.mlp.up_proj"
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def pack(values: Tensor, bits: int, dim: int, order: list[int] | None = None) -> Tensor:
    """Unsigned values [A, B] into int32 words along dim, value by value."""
    values = values.long() if dim == 1 else values.long().T
    count = 32 // bits
    rows = torch.zeros(values.shape[0], values.shape[1] // count, dtype=torch.int64)
    for word in range(rows.shape[1]):
        for place in range(count):
            column = word * count + (order[place] if order else place)
            rows[:, word] |= values[:, column] << (bits * place)
    rows = torch.where(rows >= 2**31, rows - 2**32, rows).int()
    return rows if dim == 1 else rows.T.contiguous()


def integers(seed: int, *shape: int, high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(seed: int, *shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.01).half()


def gptq(bits: int, group: int, zeros_GO: Tensor, stored_offset: int, *, shuffled: bool, num_inputs: int = 256):
    """(tensors, dense [O, I]) of one layer with 32 outputs; stored zero = zero - stored_offset."""
    num_groups = 1 if group == -1 else num_inputs // group
    q_IO, scales_GO = integers(1, num_inputs, 32, high=1 << bits), scales_of(2, num_groups, 32)
    group_I = torch.arange(num_inputs) // (num_inputs // num_groups)
    if shuffled:
        group_I = group_I[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(3))]
    dense = ((q_IO - zeros_GO[group_I]) * scales_GO.float()[group_I]).T
    stored = (zeros_GO - stored_offset) % (1 << bits)
    tensors = {
        f"{STEM}.qweight": pack(q_IO, bits, 0),
        f"{STEM}.qzeros": pack(stored, bits, 1),
        f"{STEM}.scales": scales_GO,
        f"{STEM}.g_idx": group_I.int(),
    }
    return tensors, dense


def opened(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, *more: str):
    """Load a folder into a module that wants STEM's weight and the tensors named in more."""
    write_folder(folder, tensors, {"model_type": "llama", "quantization_config": quantization})
    shapes = {f"{STEM}.weight": (32, 256)} | {name: tuple(tensors[name].shape) for name in more}
    module = RecordingModule(shapes)
    source = locate(str(folder))
    assert "quantization_config" not in source.config
    report = load(module, source)
    return module, report


def config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True} | values


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("label", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("stored_offset", [1, 0])
def test_c31_symmetric_zero_points_old_and_new_style_under_any_label(tmp_path, bits, label, stored_offset) -> None:
    zeros = torch.full((2, 32), 1 << (bits - 1))
    tensors, dense = gptq(bits, 128, zeros, stored_offset, shuffled=False)
    module, report = opened(tmp_path, tensors, config(bits=bits, checkpoint_format=label))
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)
    assert report.dtype == f"GPTQ-{bits}bit"


@pytest.mark.parametrize(("label", "stored_offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_c31_asymmetric_zero_points_follow_the_label(tmp_path, label, stored_offset, bits) -> None:
    zeros = integers(5, 2, 32, high=1 << bits)
    zeros[0, 0] = 0  # stored as all ones in the old style
    tensors, dense = gptq(bits, 128, zeros, stored_offset, shuffled=False)
    module, _ = opened(tmp_path, tensors, config(bits=bits, sym=False, checkpoint_format=label))
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)


def test_c31_ambiguous_zero_points_are_refused(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 128, integers(5, 2, 32, high=16), 1, shuffled=False)
    with pytest.raises(WeightsError, match="checkpoint_format is None"):
        opened(tmp_path, tensors, config(sym=False))
    with pytest.raises(WeightsError, match=r"says symmetric, but .*up_proj has stored zero points from"):
        opened(tmp_path, tensors, config(checkpoint_format="gptq"))


def test_c31_constant_zeros_without_any_word_are_symmetric() -> None:
    assert zero_offset("m", torch.full((2, 8), 7), 4, {}) == 1
    assert zero_offset("m", torch.full((2, 8), 8), 4, {}) == 0
    with pytest.raises(WeightsError):
        zero_offset("m", torch.full((2, 8), 5), 4, {})


@pytest.mark.parametrize("group", [128, 32, -1])
def test_c31_group_index_of_act_order(tmp_path: Path, group: int) -> None:
    num_groups = 1 if group == -1 else 256 // group
    zeros = torch.full((num_groups, 32), 8)
    tensors, dense = gptq(4, group, zeros, 1, shuffled=True)
    module, _ = opened(tmp_path, tensors, config(group_size=group, desc_act=True))
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)


def test_c31_act_order_without_its_index_is_refused(tmp_path: Path) -> None:
    tensors, dense = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    del tensors[f"{STEM}.g_idx"]
    with pytest.raises(WeightsError, match="which input is in which group"):
        opened(tmp_path, tensors, config(desc_act=True))
    module, _ = opened(tmp_path, tensors, config())  # in order without act-order
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)


def test_c31_group_index_out_of_range(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    tensors[f"{STEM}.g_idx"][3] = 2
    with pytest.raises(WeightsError, match="names groups from 0 to 2 of 2"):
        opened(tmp_path, tensors, config())


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (config(bits=3), "GPTQ with 3 bits"),
        (config(bits=2), "GPTQ with 2 bits"),
        ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (config(group_size=64), r"scales is \[2, 32\]; a group of 64 needs \[4, 32\]"),
        (config(bits=8), "needs"),
    ],
)
def test_c31_what_cannot_be_read_is_named_before_loading(tmp_path: Path, quantization, words: str) -> None:
    tensors, _ = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    with pytest.raises(WeightsError, match=words):
        opened(tmp_path, tensors, quantization)


def test_c31_excluded_modules_stay_dense(tmp_path: Path) -> None:
    tensors, dense = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    kept = {"model.layers.0.mlp.down_proj.weight": torch.randn(8, 32), "lm_head.weight": torch.randn(16, 8)}
    bias = {f"{STEM}.bias": torch.randn(32)}
    module, report = opened(
        tmp_path, tensors | kept | bias, config(modules_to_not_convert=["down_proj"]), *kept, *bias
    )  # fmt: skip
    assert all(torch.equal(module.value(name), tensor) for name, tensor in (kept | bias).items())
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)
    assert report.num_tensors == 4


def test_c31_a_module_with_a_part_missing_is_named(tmp_path: Path) -> None:
    tensors, _ = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    del tensors[f"{STEM}.scales"]
    with pytest.raises(WeightsError, match=r"lacks 'model\.layers\.0\.mlp\.up_proj\.scales'"):
        opened(tmp_path, tensors, config())


def test_older_folders_keep_the_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    tensors, dense = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    write_folder(tmp_path, tensors, {"model_type": "llama"})
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": false, "sym": true}')
    module = RecordingModule({f"{STEM}.weight": (32, 256)})
    load(module, locate(str(tmp_path)))
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", [128, 64, -1])
def test_c31_awq_with_zero_points(tmp_path: Path, group: int) -> None:
    num_groups = 1 if group == -1 else 256 // group
    q_IO, zeros_GO = integers(1, 256, 32, high=16), integers(2, num_groups, 32, high=16)
    scales_GO, group_I = scales_of(3, num_groups, 32), torch.arange(256) // (256 // num_groups)
    tensors = {
        f"{STEM}.qweight": pack(q_IO, 4, 1, AWQ),
        f"{STEM}.qzeros": pack(zeros_GO, 4, 1, AWQ),
        f"{STEM}.scales": scales_GO,
    }
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "GEMM"}
    module, report = opened(tmp_path, tensors, quantization)
    dense = ((q_IO - zeros_GO[group_I]) * scales_GO.float()[group_I]).T
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)
    assert report.dtype == "AWQ-4bit"
    with pytest.raises(WeightsError, match="AWQ's manner"):
        opened(tmp_path, tensors, config(group_size=group))


@pytest.mark.parametrize(
    ("suffix", "shape", "more"),
    [
        ("weight_scale", (), {}),
        ("weight_scale", (1,), {}),
        ("weight_scale", (32, 1), {}),
        ("weight_scale", (32,), {}),
        ("weight_scale_inv", (2, 3), {"weight_block_size": [16, 100]}),
    ],
)
def test_fp8_weights_times_their_scales(tmp_path: Path, suffix: str, shape, more) -> None:
    weight = torch.randn(32, 256).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    tensors = {f"{STEM}.weight": weight, f"{STEM}.{suffix}": scale, f"{STEM}.input_scale": torch.ones(1)}
    module, _ = opened(tmp_path, tensors, {"quant_method": "fp8", **more})
    wide = scale.view(-1, 1) if len(shape) < 2 else scale
    if more:
        wide = scale.repeat_interleave(16, 0).repeat_interleave(100, 1)[:, :256]
    torch.testing.assert_close(module.value(f"{STEM}.weight"), weight.float() * wide)


def test_fp8_scales_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(32, 256).to(torch.float8_e4m3fn)
    with pytest.raises(WeightsError, match="neither one scale"):
        opened(tmp_path, {f"{STEM}.weight": weight, f"{STEM}.weight_scale": torch.ones(2, 2)}, {"quant_method": "fp8"})
    with pytest.raises(WeightsError, match="lacks"):
        opened(tmp_path, {f"{STEM}.weight": weight}, {"quant_method": "fp8"})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_compressed_tensors_pack_quantised(tmp_path: Path, bits: int, symmetric: bool, shuffled: bool) -> None:
    q_OI, scales_OG = integers(1, 32, 256, high=1 << bits), scales_of(2, 32, 2)
    zeros_OG = torch.full((32, 2), 1 << (bits - 1)) if symmetric else integers(3, 32, 2, high=1 << bits)
    group_I = torch.arange(256) // 128
    tensors = {
        f"{STEM}.weight_packed": pack(q_OI, bits, 1),
        f"{STEM}.weight_scale": scales_OG,
        f"{STEM}.weight_shape": torch.tensor([32, 256]),
    }
    if not symmetric:
        tensors[f"{STEM}.weight_zero_point"] = pack(zeros_OG, bits, 0)
    if shuffled:
        group_I = group_I[torch.randperm(256, generator=torch.Generator().manual_seed(4))]
        tensors[f"{STEM}.weight_g_idx"] = group_I.int()
    module, _ = opened(tmp_path, tensors, {"quant_method": "compressed-tensors", "format": "pack-quantized"})
    dense = (q_OI - zeros_OG[:, group_I]) * scales_OG.float()[:, group_I]
    torch.testing.assert_close(module.value(f"{STEM}.weight"), dense, rtol=1e-5, atol=1e-6)


def test_compressed_tensors_int8_rows(tmp_path: Path) -> None:
    weight, scale = torch.randint(-128, 128, (32, 256), dtype=torch.int8), torch.rand(32, 1)
    module, _ = opened(
        tmp_path,
        {f"{STEM}.weight": weight, f"{STEM}.weight_scale": scale},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    )
    torch.testing.assert_close(module.value(f"{STEM}.weight"), weight.float() * scale)


def test_quantised_weights_reach_a_tied_model(tmp_path: Path) -> None:
    """The head rule works on the dense names: nothing of it depends on how a layer was stored."""
    tensors, _ = gptq(4, 128, torch.full((2, 32), 8), 1, shuffled=False)
    tensors["model.embed_tokens.weight"] = torch.randn(4, 4)
    write_folder(tmp_path, tensors, {"model_type": "llama", "quantization_config": config()})
    module = RecordingModule({f"{STEM}.weight": (32, 256), "model.embed_tokens.weight": (4, 4)})
    module.spec = SimpleNamespace(tied=True)
    assert load(module, locate(str(tmp_path))).num_tensors == 2
