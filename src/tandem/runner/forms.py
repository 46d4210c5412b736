"""Which graph a decode step takes, by what the attention backend bakes into it. It knows no kernels."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from torch import Tensor

from tandem.attention.contract import AttentionShape
from tandem.kernels.attention_form import graph_bound
from tandem.runner.graphs import GraphKey


class DecodeKeys:
    """The keys of a runner's decode steps. A backend without decode_form bakes in the bound on lengths itself.

    shapes   the distinct ones of the model's layers.
    """

    def __init__(self, backend: Any, keys_NPKD: Tensor, shapes: Sequence[AttentionShape]) -> None:
        self._form = getattr(backend, "decode_form", None)
        self._keys_NPKD, self._shapes = keys_NPKD, shapes
        self._known: dict[tuple[int, int, bool], tuple[Any, ...]] = {}

    def key(self, size: int, path: str, bound: int, is_uneven: bool = False) -> GraphKey:
        """Of a step of size lanes, of which none has more than bound tokens. See graph_bound."""
        forms = self._forms(size, bound, is_uneven)
        return GraphKey(size, path, forms, is_uneven and forms != self._forms(size, bound, False))

    def unlike(self, listed: Sequence[tuple[GraphKey, int]], sizes: Sequence[int], max_length: int) -> list[Any]:
        """One (key, bound) more for each attention kernel that steps of these sizes may need and none listed does.

        Decodes beside prompts are launched for their own longest span, which may be shorter than any graph's.
        """
        known, found, bound = {_kernels(key) for key, _ in listed}, [], 1
        while bound <= graph_bound(max_length):
            for size, is_uneven in product(sizes, (False, True)):
                key = self.key(size, listed[0][0].path, bound, is_uneven)
                if _kernels(key) not in known:
                    known.add(_kernels(key))
                    found.append((key, bound))
            bound *= 2
        return found

    def _forms(self, size: int, bound: int, is_uneven: bool) -> tuple[Any, ...]:
        found = self._known.get((size, bound, is_uneven))
        if found is None:
            found = (bound,)
            if self._form is not None:
                found = tuple(self._form(size, bound, self._keys_NPKD, shape, is_uneven) for shape in self._shapes)
            self._known[size, bound, is_uneven] = found
        return found


def _kernels(key: GraphKey) -> tuple[Any, ...]:
    return tuple(getattr(form, "kernel", None) for form in key.forms)
