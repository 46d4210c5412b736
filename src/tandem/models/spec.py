"""The numbers of a decoder. A number is a field here; a different computation is a Block. It knows no tensors."""

from dataclasses import dataclass

from tandem.layers.attention import AttentionShape
from tandem.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """Experts of a mixture layer: how many there are, how many a token visits, and their width.

    layers     which layers are mixtures; the others are dense.
    normalise  the visited experts' probabilities are scaled to a sum of one.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalise: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that config.json says about a decoder.

    num_logits       rows of the embedding and of the output matrix.
    rope, local_rope the rotary embedding of full and of sliding layers.
    max_length       positions the model reaches, its rope scaling included.
    window           latest positions that a sliding layer sees, itself included; None: no layer slides.
    sliding          the layers that slide.
    attention_scale  factor on the scores.
    score_softcap, logit_softcap  s·tanh(x/s) on scores and logits; None: off.
    sandwich         norms behind attention and feed-forward too (Gemma 2 and 3).
    norm_offset      added to the norms' weights of the checkpoint (Gemma: 1).
    multimodal       the checkpoint holds other towers besides this text model.
    """

    family: str
    num_logits: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeSpec
    local_rope: RopeSpec
    max_length: int
    tied: bool
    attention_scale: float
    activation: str = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich: bool = False
    norm_offset: float = 0.0
    window: int | None = None
    sliding: frozenset[int] = frozenset()
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    mixture: MixtureSpec | None = None
    dtype: str | None = None
    multimodal: bool = False

    def attention_shape(self, layer: int) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            window=self.window if layer in self.sliding else None,
            softcap=self.score_softcap,
        )

    def rope_of(self, layer: int) -> RopeSpec:
        return self.local_rope if layer in self.sliding else self.rope

    @property
    def num_parameters(self) -> int:
        """Weights in the checkpoint; a tied head counts once."""
        embeddings = self.num_logits * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.hidden_size + sum(self._layer_parameters(layer) for layer in range(self.num_layers))

    def _layer_parameters(self, layer: int) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (2 * queries + 2 * keys)
        attention += (queries + 2 * keys) * self.attention_bias + hidden * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        norms = hidden * (4 if self.sandwich else 2)
        if self.mixture is not None and layer in self.mixture.layers:
            experts = self.mixture.num_experts
            return attention + norms + experts * hidden * (1 + 3 * self.mixture.intermediate_size)
        return attention + norms + 3 * hidden * inner + (2 * inner + hidden) * self.mlp_bias

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """2 · layers · KV heads · head dimension · bytes of an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes
