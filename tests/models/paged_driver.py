"""A tiny driver of a decoder over a paged cache: what a runner does, without slots, sampling or threads."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.attention.choice import attention_backend
from tandem.attention.contract import Batch, KVCache
from tandem.layers.linear import LinearScheme
from tandem.models.decoder import Decoder
from tandem.models.registry import build, spec_from_config

Span = tuple[int, list[int]]
"""Start position and the ids to compute; one entry a request."""


class Paged:
    """Requests 0..n-1, each with its own scattered blocks."""

    def __init__(
        self, model: Decoder, num_requests: int = 1, length: int = 128, block_size: int = 16, backend: str = "cpu"
    ):
        self.model, self.block_size = model, block_size
        spec, self.columns = model.spec, -(-length // block_size)
        num_blocks = num_requests * self.columns + 3
        dtype = model.embedding_VE.dtype
        self.cache = KVCache.allocate(
            spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype, torch.device("cpu")
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self.tables_SB = order[: num_requests * self.columns].view(num_requests, self.columns)
        self.backend = attention_backend(backend, "cpu")

    @torch.inference_mode()
    def step(self, spans: dict[int, Span], every: bool = False) -> Tensor:
        """Logits of each span's last token, in the order of the dict (decodes first), or of every token."""
        batch = make_batch(spans, self.tables_SB, self.block_size)
        if every:
            batch.sampled_R = None
        return self.model.logits(self.model(batch, self.cache, self.backend))

    def greedy(self, request: int, prompt: list[int], num_tokens: int, chunk: int = 10**6) -> list[int]:
        """Prefill in chunks, then decode."""
        for start in range(0, len(prompt), chunk):
            logits = self.step({request: (start, prompt[start : start + chunk])})
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < num_tokens:
            logits = self.step({request: (len(prompt) + len(tokens) - 1, tokens[-1:])})
            tokens.append(int(logits[-1].argmax()))
        return tokens


def make_batch(spans: dict[int, Span], tables_SB: Tensor, block_size: int) -> Batch:
    ids, positions, slots, starts, lengths = [], [], [], [0], []
    for request, (start, tokens) in spans.items():
        table = tables_SB[request].tolist()
        for position, token in enumerate(tokens, start):
            ids.append(token)
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(ids))
        lengths.append(start + len(tokens))
    num_decodes = 0
    for _, tokens in spans.values():
        if len(tokens) != 1:
            break
        num_decodes += 1
    return Batch(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        lengths_S=torch.tensor(lengths, dtype=torch.int32),
        tables_SB=tables_SB[list(spans)].to(torch.int32),
        sampled_R=torch.tensor(starts[1:]) - 1,
        num_decodes=num_decodes,
        max_query=max(len(tokens) for _, tokens in spans.values()),
        max_length=max(lengths),
        host_spans=[(start, len(tokens)) for start, tokens in spans.values()],
    )


def load_saved(reference: Any, folder: Path | None = None, linear: LinearScheme | None = None) -> Decoder:
    """A decoder with the weights that transformers saves for its model: names and config.json as on the hub."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        reference.save_pretrained(place)
        tensors = {name: t for file in sorted(place.glob("*.safetensors")) for name, t in load_file(file).items()}
    model = build(spec_from_config(reference.config.to_dict()), torch.float32, "cpu", linear=linear)
    write_all(model, tensors)
    return model


def write_all(model: Decoder, tensors: dict[str, Tensor]) -> None:
    """Every target written once, nothing left over."""
    targets = model.targets()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    extra = [name for name in tensors if name not in targets and not model.ignored(name)]
    missing = [name for name in targets if name not in tensors]
    assert not extra and not missing, (extra, missing)
    for name, target in targets.items():
        target.write(tensors[name])
    unwritten = [name for name, p in model.named_parameters() if bool(torch.isnan(p).any())]
    assert not unwritten
