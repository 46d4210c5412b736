"""Small tokenizers of the two great kinds, made in place: byte-level BPE and sentencepiece with byte fallback."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.engine.text import Text


def byte_level(words: list[str] = ()) -> Tokenizer:
    """One id a byte, further ids for whole words, then <s> (id len - 3), </s> and <|turn|>."""
    table = {byte: c for c, byte in byte_characters().items()}
    pieces = sorted(table.values()) + ["".join(table[b] for b in word.encode()) for word in words]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<|turn|>")])
    return tokenizer


def byte_characters() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet, asked of the library itself."""
    probe = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for code in [*range(0x80), *range(0x80, 0x800), *range(0x800, 0x110000, 0x9FF)]:
        if not 0xD800 <= code < 0xE000:
            for c, byte in zip(probe.pre_tokenize_str(chr(code))[0][0], chr(code).encode(), strict=True):
                found[c] = byte
    for byte in range(256):  # bytes that no character of UTF-8 uses
        if byte not in found.values():
            found[chr(byte)] = byte
    return found


SENTENCE_PIECES = ["▁world", "▁is", "▁big", "▁Hello", "▁", "world", "a", "b", "▁naïve", "日本"]


def sentencepiece() -> Tokenizer:
    """<unk> <s> </s>, 256 byte pieces, then SENTENCE_PIECES; adds <s> in front by its own post-processor."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCE_PIECES]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def byte_level_text(words: list[str] = (), **options) -> Text:
    tokenizer = byte_level(words)
    options = {"bos_id": tokenizer.token_to_id("<s>"), "eos_ids": [tokenizer.token_to_id("</s>")], **options}
    return Text(tokenizer.to_str(), **options)


def sentencepiece_text(**options) -> Text:
    return Text(sentencepiece().to_str(), **{"bos_id": 1, "eos_ids": [2], "add_bos": True, **options})


def ids_of(text: Text, pieces: list[str]) -> list[int]:
    """The id of each piece; for byte-level tokenizers written as text, not in the alphabet."""
    table = {byte: c for c, byte in byte_characters().items()}
    layout = json.loads(text.json)
    if layout["decoder"]["type"] == "ByteLevel":
        pieces = [p if p.startswith("<") else "".join(table[b] for b in p.encode()) for p in pieces]
    ids = [text.tokenizer.token_to_id(piece) for piece in pieces]
    assert None not in ids, pieces
    return ids
