"""A tokenizer of bytes: token id = byte + 3, so that tests read what they feed."""

import functools


@functools.cache
def byte_tokenizer_json() -> str:
    """The JSON of a tokenizer with one token a byte, behind <pad>, <bos> and <eos>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{mark: index + 3 for index, mark in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<bos>", "<eos>")])
    return tokenizer.to_str()
