"""What a model's weights take in memory, by the scheme of its linear layers. It counts; it makes no tensor."""

from collections.abc import Iterator
from typing import NamedTuple

from tandem.layers.quantised import SCHEMES
from tandem.models.spec import ModelSpec


class Stored(NamedTuple):
    """fixed_bytes whatever the model's dtype, and elements of that dtype."""

    fixed_bytes: int
    num_elements: int


def stored(spec: ModelSpec) -> dict[str, Stored]:
    """On a CPU, by the name of the scheme. There the head has a layout of its own, so that a tied one is kept twice."""
    head_elements = spec.num_logits * spec.hidden_size
    num_elements = spec.num_parameters + head_elements * spec.tied
    found = {"dense": Stored(0, num_elements)}
    for name, make in SCHEMES.items():
        scheme = make()
        fixed_bytes, rest = scheme.head_bytes(spec.hidden_size, spec.num_logits), num_elements - head_elements
        for in_size, out_size in _linear_sizes(spec):
            num_bytes = scheme.stored_bytes(in_size, out_size)
            if num_bytes is not None:
                fixed_bytes, rest = fixed_bytes + num_bytes, rest - in_size * out_size
        found[name] = Stored(fixed_bytes, rest)
    return found


def _linear_sizes(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """(in, out) of each linear layer that a scheme makes, its parts merged; experts are none."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for layer in range(spec.num_layers):
        yield hidden, queries + 2 * keys
        yield queries, hidden
        if spec.mixture is None or layer not in spec.mixture.layers:
            yield hidden, 2 * inner
            yield inner, hidden
