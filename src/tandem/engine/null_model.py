"""The model of the null device: no weights, and a tokenizer with one token a byte. It knows no runner."""

import functools
from typing import Any

NUM_SPECIAL = 3
CONFIG: dict[str, Any] = {"model_type": "null", "vocab_size": 256 + NUM_SPECIAL, "max_position_embeddings": 32768}
KV_ELEMENTS = 4096
"""Made up: 16 KiB a token in float32, so that the usual cache sizes give thousands of blocks."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@functools.cache
def byte_tokenizer_json() -> str:
    """tokenizer.json of one token a byte (in the alphabet of byte-level BPE), behind <pad>, <bos> and <eos>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ("<pad>", "<bos>", "<eos>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return str(tokenizer.to_str())
