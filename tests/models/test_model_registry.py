"""From config.json to a spec: built-in shapes, refusals that name the reason; what a decoder takes and ignores."""

from typing import Any

import pytest
import torch
from paged_driver import Paged, write_all

from tandem.errors import ModelError
from tandem.layers.linear import linear_scheme
from tandem.layers.quantised import SCHEMES, int4_codes
from tandem.models.named import NAMES, named_config
from tandem.models.registry import build, spec_from_config
from tandem.models.stored import stored

CPU = torch.device("cpu")
SIZES = {
    "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-0.5b": 494_032_768, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624, "gemma-3-1b": 999_885_952, "smollm2-135m": 134_515_008,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_named_shapes_have_the_published_sizes(name: str) -> None:
    config = named_config(name)
    assert config is not None
    spec = spec_from_config(config)
    if name in SIZES:
        assert spec.num_parameters == SIZES[name]
    assert spec.kv_bytes_per_token(2) == 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim


def test_named_shapes_are_copies_and_unknown_is_none() -> None:
    config = named_config("Tiny")
    assert config is not None
    config["hidden_size"] = 1
    assert named_config("tiny") != config
    assert named_config("no-such-shape") is None


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "qwen3-30b-a3b", "gemma-3-1b", "smollm2-135m"])
@pytest.mark.parametrize("quantize", ["w8a8", "int4"])
def test_what_quantised_weights_take_is_what_the_layers_hold(name: str, quantize: str) -> None:
    spec = spec_from_config(named_config(name) or {})
    model = build(spec, torch.float32, torch.device("meta"), linear=SCHEMES[quantize]())
    held = sum(parameter.nbytes for parameter in model.parameters())
    fixed_bytes, num_elements = stored(spec)[quantize]
    assert fixed_bytes + 4 * num_elements == held
    assert held < 4 * spec.num_parameters


def test_a_tied_head_is_kept_twice_on_a_cpu() -> None:
    for name, copies in (("llama-3.1-8b", 0), ("smollm2-135m", 1)):
        spec = spec_from_config(named_config(name) or {})
        assert stored(spec)["dense"] == (0, spec.num_parameters + copies * spec.num_logits * spec.hidden_size)


TINY: dict[str, Any] = {**(named_config("tiny") or {})}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"vocab_size": -3}, "vocab_size is -3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"torch_dtype": "float8"}, "'float8'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"max_position_embeddings": None}, "'max_position_embeddings'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["odd"] * 2}, "odd"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_unsupported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec_from_config({**TINY, **changes})


def test_windows_slide_where_the_family_says() -> None:
    base = {**TINY, "num_hidden_layers": 6, "sliding_window": 32}
    assert spec_from_config({**base, "model_type": "llama"}).window is None
    assert spec_from_config({**base, "model_type": "mistral"}).sliding == frozenset(range(6))
    gemma = spec_from_config({**base, "model_type": "gemma3_text", "head_dim": 16})
    assert gemma.sliding == {0, 1, 2, 3, 4} and gemma.attention_shape(5).window is None
    qwen = {**base, "model_type": "qwen2", "max_window_layers": 4}
    assert spec_from_config(qwen).sliding == frozenset()
    assert spec_from_config({**qwen, "use_sliding_window": True}).sliding == {4, 5}


def test_multimodal_gemma_is_read_as_its_text_model() -> None:
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "sliding_window": 16}
    spec = spec_from_config({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    assert (spec.family, spec.num_heads, spec.head_dim, spec.num_logits) == ("gemma3_text", 8, 256, 262208)
    assert spec.multimodal and spec.dtype == "bfloat16"


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        name: torch.ones(target.shape) if "norm" in name else torch.randn(target.shape) * 0.1
        for name, target in model.targets().items()
    }


def test_ignored_tensors() -> None:
    tied = build(spec_from_config(TINY), torch.float32, CPU)
    untied = build(spec_from_config({**TINY, "tie_word_embeddings": False}), torch.float32, CPU)
    for model in (tied, untied):
        assert model.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
        assert not model.ignored("model.layers.0.self_attn.q_proj.weight")
        assert not model.ignored("vision_tower.weight")
    assert tied.ignored("lm_head.weight") and "lm_head.weight" not in tied.targets()
    assert not untied.ignored("lm_head.weight") and "lm_head.weight" in untied.targets()


def test_max_length_cuts_the_rope_tables() -> None:
    spec = spec_from_config(TINY)
    model = build(spec, torch.float32, CPU, max_length=40)
    assert model.spec.max_length == 40
    assert model.blocks[0].attention.cos_sin_LD.shape[0] == 40
    assert build(spec, torch.float32, CPU, max_length=10**6).spec.max_length == spec.max_length


def on_4_bit_grid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The projections as a 4-bit file would hold them."""
    rounded = dict(tensors)
    for name, tensor in tensors.items():
        if "_proj" in name:
            codes, pairs = int4_codes(tensor)
            rounded[name] = ((codes.unflatten(1, (-1, 32)) - 8) * pairs[..., :1] + pairs[..., 1:]).flatten(1)
    return rounded


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("scheme", "cosine"), [("w8a8", 0.998), ("int4", 0.998)])
def test_quantised_decoder_stays_close(scheme: str, cosine: float, tied: bool) -> None:
    """Against the dense decoder with the same weights; for int4 those of a 4-bit file, whose codes it must keep."""
    spec = spec_from_config({**TINY, "tie_word_embeddings": tied})
    exact = build(spec, torch.float32, CPU)
    tensors = tensors_of(exact)
    tensors = on_4_bit_grid(tensors) if scheme == "int4" else tensors
    write_all(exact, tensors)
    lossy = build(spec, torch.float32, CPU, linear=linear_scheme(scheme, CPU))
    write_all(lossy, tensors)
    prompt = torch.randint(0, 512, (20,)).tolist()
    expected = Paged(exact).step({0: (0, prompt)}, every=True)
    found = Paged(lossy).step({0: (0, prompt)}, every=True)
    assert not torch.equal(found, expected)
    assert torch.cosine_similarity(found, expected, dim=-1).min() > cosine


def test_half_precision_runs_close() -> None:
    spec = spec_from_config(TINY)
    exact, half = build(spec, torch.float32, CPU), build(spec, torch.bfloat16, CPU)
    tensors = tensors_of(exact)
    write_all(exact, tensors)
    write_all(half, tensors)
    expected = Paged(exact).step({0: (0, [1, 2, 3, 4])})
    found = Paged(half).step({0: (0, [1, 2, 3, 4])})
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.999
