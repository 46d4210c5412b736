"""Counter-based random numbers: one uniform for each (seed, position). It keeps no state and knows no request.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The counter is
(position, stream, 0, 0) and the key the 64 bits of the seed, low word first. For stream 0 that is the counter layout
of Triton's ``tl.philox(seed, position, 0, 0, 0)``, so that a kernel can draw the same words.
"""

import hashlib

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counters_R4: Tensor, keys_R2: Tensor) -> Tensor:
    """Philox 4x32-10 of each row: int64 counters [R, 4] and keys [R, 2], each holding a 32-bit word → words [R, 4]."""
    multipliers_2 = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=counters_R4.device)
    weyl_2 = torch.tensor(_WEYL, dtype=torch.int64, device=counters_R4.device)
    even_R2, odd_R2 = counters_R4[:, 0::2], counters_R4[:, 1::2]
    for _ in range(_ROUNDS):
        # The product wraps modulo 2^64; the shift drags the sign along, which the mask cuts off again.
        product_R2 = even_R2 * multipliers_2
        high_R2 = (product_R2 >> 32) & _WORD
        even_R2, odd_R2 = high_R2.flip(1) ^ odd_R2 ^ keys_R2, (product_R2 & _WORD).flip(1)
        keys_R2 = (keys_R2 + weyl_2) & _WORD
    return torch.stack((even_R2, odd_R2), dim=2).flatten(1)


def uniforms(seeds_R: Tensor, positions_R: Tensor, stream: int = 0) -> Tensor:
    """One float64 in [0, 1) with 53 random bits for each (seed, position); both int64 [R]. A pure function of the two.

    stream  sets apart several draws at one position (0: the sampled token).
    """
    zeros_R = torch.zeros_like(seeds_R)
    counters_R4 = torch.stack((positions_R & _WORD, zeros_R + stream, zeros_R, zeros_R), dim=1)
    keys_R2 = torch.stack((seeds_R & _WORD, (seeds_R >> 32) & _WORD), dim=1)
    words_R4 = philox(counters_R4, keys_R2)
    bits_R = ((words_R4[:, 0] & 0x1FFFFF) << 32) | words_R4[:, 1]
    return bits_R.to(torch.float64) * 2.0**-53


def derived_seed(engine_seed: int, request: str) -> int:
    """The seed of a request that brought none: 64 signed bits from the engine's seed and the request's id (BLAKE2b)."""
    digest = hashlib.blake2b(f"{engine_seed}:{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
