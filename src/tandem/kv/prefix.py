"""Names for contents: chained digests of full blocks of tokens. It knows neither blocks nor who owns them.

The digest of block i covers the salt and every token from 0 to the end of block i, because it hashes the digest of
block i-1. BLAKE2b with 32 bytes (RFC 7693): a client cannot make two prompts collide and read another's answers.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class Chain:
    """The digests of one request's full blocks, made when first asked for and kept, also across a preemption."""

    __slots__ = ("_block_size", "_digests", "_root")

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"salt").digest()
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._digests)

    def digest(self, index: int, tokens: Sequence[int]) -> bytes:
        """The digest of block index of tokens, which must hold that whole block and never change before its end."""
        digests, size = self._digests, self._block_size
        while len(digests) <= index:
            begin = len(digests) * size
            block = tokens[begin : begin + size]
            assert len(block) == size, "only full blocks have a digest"
            parent = digests[-1] if digests else self._root
            digests.append(blake2b(parent + array("q", block).tobytes(), digest_size=DIGEST_BYTES).digest())
        return digests[index]
