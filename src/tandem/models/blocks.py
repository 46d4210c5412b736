"""The decoder blocks: what differs between families as a computation. They know layers and tensor names, no files."""

import torch
from torch import Tensor, nn

from tandem.layers.attention import Attention, AttentionBackend, Batch
from tandem.layers.feedforward import GatedFeedForward
from tandem.layers.linear import Linear, LinearScheme, whole_sum
from tandem.layers.mixture import Mixture, mixture
from tandem.layers.norm import RMSNorm
from tandem.layers.target import Target, whole
from tandem.models.spec import ModelSpec

MIXTURE_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


class Block(nn.Module):
    """Norm, attention, norm, feed-forward, each added to the residual stream (Llama, Mistral, Qwen, Mixtral).

    The stream travels as a pair, (hidden, residual), so that each addition is fused with the norm that follows it.
    """

    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")

    def __init__(
        self, spec: ModelSpec, layer: int, cos_sin_LD: Tensor, scheme: LinearScheme, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        # A plain list beside the registered one: indexing a ModuleList costs as much as a small kernel.
        self.norms = [RMSNorm(spec.hidden_size, spec.norm_eps, device) for _ in self.norm_names]
        self.registered_norms = nn.ModuleList(self.norms)
        self.attention = Attention(
            spec.hidden_size, spec.attention_shape(layer), cos_sin_LD, qkv_bias=spec.attention_bias,
            output_bias=spec.output_bias, qk_norm=spec.qk_norm, eps=spec.norm_eps, scheme=scheme, dtype=dtype,
            device=device,
        )  # fmt: skip
        self.feed_forward: Mixture | GatedFeedForward
        if spec.mixture is not None and layer in spec.mixture.layers:
            self.feed_forward = mixture(
                spec.hidden_size, spec.mixture.intermediate_size, spec.mixture.num_experts, spec.mixture.num_chosen,
                spec.mixture.normalise, spec.activation, invariant=getattr(scheme, "invariant", False), dtype=dtype,
                device=device,
            )  # fmt: skip
        else:
            self.feed_forward = GatedFeedForward(
                spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias, scheme=scheme,
                dtype=dtype, device=device,
            )  # fmt: skip

    def forward(
        self, hidden_TE: Tensor, residual_TE: Tensor | None, batch: Batch, keys_NPKD: Tensor, values_NPKD: Tensor,
        backend: AttentionBackend, wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """wanted_R: the tokens that go on behind attention; of the others keys and values are written, no more."""
        hidden_TE, residual_TE = self.norms[0].add(hidden_TE, residual_TE)
        hidden_TE = self.attention(hidden_TE, batch, keys_NPKD, values_NPKD, backend, wanted_R)
        if wanted_R is not None:
            residual_TE = residual_TE.index_select(0, wanted_R)
            if not len(wanted_R):
                return hidden_TE, residual_TE
        return self._feed(hidden_TE, residual_TE)

    def _feed(self, hidden_TE: Tensor, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TE, residual_TE = self.norms[1].add(hidden_TE, residual_TE)
        return self.feed_forward(hidden_TE), residual_TE

    def targets(self) -> dict[str, Target]:
        """Tensor name behind `model.layers.<n>.` → its place."""
        offset = self.spec.norm_offset
        norms = zip(self.norm_names, self.norms, strict=True)
        places = {f"{name}.weight": whole(norm.weight_E.data, offset) for name, norm in norms}
        attention = self.attention
        places |= linear_targets(attention.qkv, [f"self_attn.{name}_proj" for name in "qkv"])
        places |= linear_targets(attention.output, ["self_attn.o_proj"])
        if attention.query_norm_D is not None and attention.key_norm_D is not None:
            places["self_attn.q_norm.weight"] = whole(attention.query_norm_D.data, offset)
            places["self_attn.k_norm.weight"] = whole(attention.key_norm_D.data, offset)
        if isinstance(self.feed_forward, GatedFeedForward):
            places |= linear_targets(self.feed_forward.gate_up, ["mlp.gate_proj", "mlp.up_proj"])
            return places | linear_targets(self.feed_forward.down, ["mlp.down_proj"])
        router, prefix, parts = MIXTURE_NAMES[self.spec.family]
        places[f"{router}.weight"] = self.feed_forward.router_target()
        for expert in range(self.feed_forward.num_experts):
            for part, target in self.feed_forward.targets(expert).items():
                places[f"{prefix.format(expert)}{parts[part]}.weight"] = target
        return places


class SandwichBlock(Block):
    """Like Block, with a norm behind attention and feed-forward too, before they are added (Gemma 2 and 3)."""

    norm_names = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip

    def _feed(self, hidden_TE: Tensor, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TE = self.norms[1](whole_sum(hidden_TE, residual_TE.dtype))
        hidden_TE, residual_TE = self.norms[2].add(hidden_TE, residual_TE)
        return self.norms[3](whole_sum(self.feed_forward(hidden_TE), residual_TE.dtype)), residual_TE


def linear_targets(linear: Linear, names: list[str]) -> dict[str, Target]:
    """Names of a merged layer's parts, in order → their weights and biases."""
    places = {f"{name}.weight": linear.target(part) for part, name in enumerate(names)}
    if linear.bias is not None:
        places |= {f"{name}.bias": linear.bias_target(part) for part, name in enumerate(names)}
    return places
