"""Of the layers that are acted out, the last is of the kind of the model's last: its tokens are fewer."""

import pytest

from tandem.models.registry import spec_from_config
from tandem.runner.variants import _few_layers

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 89, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize("plain", [[], [7], [0], [0, 7], [2, 3, 7]])
def test_the_last_layer_is_of_the_last_ones_kind(plain):
    spec = spec_from_config({**CONFIG, "mlp_only_layers": plain})
    few = _few_layers(spec)
    assert (few.num_layers - 1 in spec.mixture.layers) == (7 in spec.mixture.layers)
    assert {n in spec.mixture.layers for n in range(few.num_layers)} == {n in spec.mixture.layers for n in range(8)}
