"""How attention of a decode step is launched: splits, tiles and warps by shape, as they were measured (docs/log.md).

It knows numbers alone; the kernel is in attention_decode.py.
"""

import math
from typing import NamedTuple

from tandem.kernels.launch import Target, next_power_of_2, reads_ahead

MOST_SPLITS = 64
SHORTEST_BOUND = 256  # tokens; graphs are captured for powers of two, this one first


def graph_bound(max_length: int) -> int:
    """The most tokens of a span that a graph for spans of max_length is captured for."""
    return max(SHORTEST_BOUND, next_power_of_2(max_length))


class DecodeForm(NamedTuple):
    """All that is chosen for a launch of decode_attention, and that a captured graph bakes in.

    num_splits             programs that share a (span, KV head).
    tile                   tokens that a program takes at once.
    num_warps, num_stages  of a program.
    ahead                  whether its first tile is read ahead of the wait for the kernel before.
    by_length              whether programs take the longest spans first.
    """

    num_splits: int
    tile: int
    num_warps: int = 2
    num_stages: int = 3
    ahead: bool = False
    by_length: bool = False

    @property
    def kernel(self) -> "DecodeForm":
        """The same for all forms that one compiled kernel does."""
        return self._replace(num_splits=min(self.num_splits, 2))


def decode_form(
    num_spans: int, max_length: int, num_kv_heads: int, group: int, head_dim: int, item_bytes: int, target: Target,
    is_uneven: bool = False,
) -> DecodeForm:  # fmt: skip
    """The form for spans of at most max_length tokens; is_uneven: some are much longer than others.

    group: query heads a KV head; item_bytes: of the cache's dtype.
    """
    tile, num_groups = tile_size(head_dim, item_bytes), num_spans * num_kv_heads
    num_multiprocessors = target.num_multiprocessors
    usual = num_splits_for(num_groups, max_length, tile, num_multiprocessors)
    splits = num_splits_for(num_groups, max_length, tile, num_multiprocessors, is_uneven)
    # Looking up the longest span takes half a microsecond, which few spans do not earn back.
    form = DecodeForm(splits, tile, ahead=reads_ahead(num_spans), by_length=splits == 1 or splits > usual)
    if form.ahead and num_spans <= 4:
        has_one_tile = splits < num_splits_for(num_groups, 1 << 30, tile, num_multiprocessors)
        return form._replace(num_warps=4, num_stages=1) if has_one_tile else form
    is_measured = target.capability[0] == 9 and head_dim == 128 and item_bytes == 2 and group <= 16
    if is_uneven or not is_measured:  # one warp has no registers for more query heads
        return form
    if form.ahead:
        return form._replace(num_splits=min(2 * splits, MOST_SPLITS), tile=tile // 2, num_warps=1, by_length=False)
    return form._replace(num_warps=_num_warps(num_groups, num_multiprocessors)) if splits == 1 else form


def _num_warps(num_programs: int, num_multiprocessors: int) -> int:
    """Warps of programs that all have as much to do: two, or one where its last wave is much fuller.

    Of a head of 128 in 16 bits on capability 9.0 five programs of two warps fit on a multiprocessor, six of one, by
    their shared memory; 96 spans of 8 KV heads are 1.16 waves of the first and 0.97 of the second (143 and 121 µs).
    """
    waves = [num_programs / (fit * num_multiprocessors) for fit in (5, 6)]
    two, one = (count / math.ceil(count) for count in waves)
    return 1 if one > two + 0.15 else 2


def tile_size(head_dim: int, item_bytes: int) -> int:
    """Tokens a tile: about 16 KiB of keys, so that three stages of keys and values fit twice into shared memory."""
    return min(max(16384 // (next_power_of_2(head_dim) * item_bytes), 32), 128)


def num_splits_for(
    num_groups: int, max_length: int, tile: int, num_multiprocessors: int, is_uneven: bool = False
) -> int:
    """How many programs share one (span, KV head): enough for about four a multiprocessor, each two tiles or more.

    is_uneven: twice as many from one program to four a multiprocessor, where the longest spans would end alone.
    """
    wanted = next_power_of_2(max(4 * num_multiprocessors // max(num_groups, 1), 1) + 1) // 2
    if is_uneven and num_multiprocessors <= num_groups <= 4 * num_multiprocessors:
        wanted *= 2
    return max(1, min(wanted, next_power_of_2(-(-max_length // tile)), MOST_SPLITS))
