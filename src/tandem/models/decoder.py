"""A decoder-only transformer over a paged cache. It knows blocks and tensor names; not files, plans or devices.

One step: ids → embedding → blocks → final norm → hidden; logits on demand. Behind the attention of the last block there
are only the tokens whose logits are wanted.
"""

import re

import torch
from torch import Tensor, nn

from tandem.layers.attention import AttentionBackend, Batch, KVCache
from tandem.layers.linear import LinearScheme, host_linear, linear, raise_winners
from tandem.layers.norm import RMSNorm
from tandem.layers.rotary import RopeSpec, cos_sin_table
from tandem.layers.target import Target, whole
from tandem.models.blocks import Block, SandwichBlock
from tandem.models.spec import ModelSpec

IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|self_attn\.(masked_)?bias$")
TOWERS = ("vision_tower.", "multi_modal_projector.")


class Decoder(nn.Module):
    """Holds parameters and rope tables, nothing of any request; forward is safe to capture as a CUDA graph."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, scheme: LinearScheme) -> None:
        super().__init__()
        self.spec = spec
        # Rounded to the model's dtype, as Gemma was trained.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        tables: dict[RopeSpec, Tensor] = {}
        for layer in range(spec.num_layers):
            rope = spec.rope_of(layer)
            if rope not in tables:
                tables[rope] = cos_sin_table(rope, spec.max_length, device)
        shape = (spec.num_logits, spec.hidden_size)
        self.embedding_VE = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        kind = SandwichBlock if spec.sandwich else Block
        self.blocks = nn.ModuleList(
            [kind(spec, n, tables[spec.rope_of(n)], scheme, dtype, device) for n in range(spec.num_layers)]
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device)
        self.invariant = getattr(scheme, "invariant", False)
        self.head = scheme.create_head(spec.hidden_size, spec.num_logits, dtype, device)
        if self.head is None:
            head_VE = self.embedding_VE
            if not spec.tied:
                head_VE = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
            self.head_VE = head_VE

    def forward(self, batch: Batch, cache: KVCache, backend: AttentionBackend) -> Tensor:
        """Compute a step, its keys and values written into the cache. Calls backend.prepare first.

        Returns [R, E] behind the final norm: the rows batch.sampled_R, or all T.
        """
        backend.prepare(batch, cache.block_size)
        hidden_TE = batch.embedded_TE
        if hidden_TE is None:
            hidden_TE = self.embedding_VE.index_select(0, batch.ids_T)
        if self.spec.embedding_scale != 1.0:
            hidden_TE = hidden_TE * self.embedding_scale
        residual_TE: Tensor | None = None
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            hidden_TE, residual_TE = block(
                hidden_TE, residual_TE, batch, cache.keys[layer], cache.values[layer], backend,
                wanted_R=batch.sampled_R if layer == last else None,
            )  # fmt: skip
        assert residual_TE is not None
        return self.norm.add(hidden_TE, residual_TE)[0]

    def logits(self, hidden_RE: Tensor, as_computed: bool = False) -> Tensor:
        """float32 [R, V]. as_computed: in the model's dtype unless they are capped, for kernels that take either."""
        if self.head is not None:
            logits_RV = self.head(hidden_RE)
        elif self.head_VE.is_cpu:
            logits_RV = host_linear(hidden_RE, self.head_VE)
        else:
            logits_RV = linear(hidden_RE, self.head_VE, invariant=self.invariant)
        if self.spec.logit_softcap is not None:
            return torch.tanh(logits_RV.float() / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits_RV if as_computed else logits_RV.float()

    def raise_winners(self, hidden_RE: Tensor, num_ids: int, winners_RW: Tensor) -> bool:
        """Raise each row's winner by the first num_ids of its logits, of which none is written; see kernels/linear.py.

        Returns False, with nothing done, where logits are needed.
        """
        if self.head is not None or self.head_VE.is_cpu or self.spec.logit_softcap is not None:
            return False
        return raise_winners(hidden_RE, self.head_VE, num_ids, winners_RW, self.invariant)

    def targets(self) -> dict[str, Target]:
        """Hugging Face tensor name → its place; together they cover every parameter exactly once."""
        places = {"model.norm.weight": whole(self.norm.weight_E.data, self.spec.norm_offset)}
        places["model.embed_tokens.weight"] = self._embedding_target()
        if not self.spec.tied:
            places["lm_head.weight"] = whole(self.head_VE.data) if self.head is None else self.head.target()
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            places |= {f"model.layers.{layer}.{name}": target for name, target in block.targets().items()}
        return places

    def _embedding_target(self) -> Target:
        head = self.head.target() if self.head is not None and self.spec.tied else None

        def store(tensor_VE: Tensor) -> None:
            self.embedding_VE.copy_(tensor_VE)
            if head is not None:
                head.write(tensor_VE)

        return Target(tuple(self.embedding_VE.shape), store)

    def ignored(self, name: str) -> bool:
        """A tensor that a checkpoint may hold and this model does not need: rotary buffers, a tied head, a tower."""
        if self.spec.multimodal and name.removeprefix("model.").startswith(TOWERS):
            return True
        return IGNORED.search(name) is not None or (self.spec.tied and name == "lm_head.weight")
