"""Tokenizers built from GGUF metadata: SentencePiece's BPE against a plain reading of it; the embedded model's ids."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_files import CORPUS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tandem.errors import WeightsError
from tandem.weights.gguf_tokenizer import adds_bos, gguf_tokenizer
from tandem.weights.source import locate

TEXTS = [
    "Hello world", " it's  1234567 o'clock\n\n  x", "déjà vu 你好🦙 \t\r\n", "THEY'RE 3.14159", "ﬁ ½ Ⅷ", "  ", "",
    "the lazy dog<s>the fox", "a\u00a0b", *CORPUS[:3],
]  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as SentencePiece orders them: specials, bytes, merged pieces by rank, characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=250, show_progress=False))
    pieces = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    pieces = [piece for piece in pieces if not set(piece) & set("世界好")]  # left to the byte tokens
    merged = [piece for piece in pieces if len(piece) > 1]
    letters = sorted(piece for piece in pieces if len(piece) == 1)
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))
    return tokens, scores, types


def header(vocabulary, **more: Any) -> SimpleNamespace:
    tokens, scores, types = vocabulary
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1, **more}
    found = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return SimpleNamespace(path=Path("x.gguf"), metadata=found, text=lambda key: found[key])


def plain_reading(text: str, vocabulary, *, prefix: bool) -> list[int]:
    """SentencePiece's BPE, literally: join the neighbours whose union scores best, leftmost first, until none is left.

    Source: Kudo & Richardson 2018, and sentencepiece's bpe_model.cc.
    """
    tokens, scores, types = vocabulary
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    out: list[int] = []
    for i, piece in enumerate(text.split("<s>")):
        out += [1] if i else []
        symbols = list(("▁" + piece if prefix and piece else piece).replace(" ", "▁"))
        while True:
            pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
            if not pairs:
                break
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            out += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return out


@pytest.mark.parametrize("prefix", [True, False])
def test_c32_sentencepiece_vocabularies(vocabulary, prefix: bool) -> None:
    gguf = header(vocabulary, add_space_prefix=prefix)
    own = Tokenizer.from_str(gguf_tokenizer(gguf))
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ids == plain_reading(text, vocabulary, prefix=prefix), text
        if "<s>" not in text:
            assert own.decode(ids) == text
        assert own.encode(text).ids == [1, *ids]


def test_c32_bos_only_where_the_file_wants_it(vocabulary) -> None:
    assert adds_bos(header(vocabulary))
    gguf = header(vocabulary, add_bos_token=False)
    assert not adds_bos(gguf) and Tokenizer.from_str(gguf_tokenizer(gguf)).encode("a").ids[0] != 1
    both = Tokenizer.from_str(gguf_tokenizer(header(vocabulary, add_eos_token=True, eos_token_id=2)))
    assert both.encode("a").ids[0] == 1 and both.encode("a").ids[-1] == 2


def test_tokens_of_the_same_text_keep_the_others_in_place(vocabulary) -> None:
    tokens, scores, types = vocabulary
    doubled = ([*tokens, tokens[-1], "last"], [*scores, -999.0, -1000.0], [*types, 1, 4])
    own = Tokenizer.from_str(gguf_tokenizer(header(doubled)))
    assert own.token_to_id("last") == len(tokens) + 1 and own.token_to_id(tokens[-1]) == len(tokens) - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "t5"}, "'t5'"),
        ({"tokens": []}, "no tokens"),
        ({"scores": [0.0]}, "a score for each"),
        ({"token_type": [1]}, "types for 1"),
        ({"model": "gpt2", "pre": "gpt-2"}, "no merges"),
    ],
)
def test_broken_vocabularies_are_refused(vocabulary, change, words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        gguf_tokenizer(header(vocabulary, **change))


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, Any, Any]:
    """The embedded model's source, own tokenizer, and the one that transformers makes from the same file."""
    transformers = pytest.importorskip("transformers")
    source = locate(None)
    if source.kind == "gguf":
        with pytest.MonkeyPatch.context() as patch:  # its reader slices a memmap a million times; an array is quicker
            patch.setattr(np, "memmap", lambda *place, **how: np.fromfile(place[0], np.uint8))
            theirs = transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    else:
        theirs = transformers.AutoTokenizer.from_pretrained(source.path)
    return source, Tokenizer.from_str(source.tokenizer_json), theirs


WORDS = [
    "Hello world", "What is the capital of France?", "déjà vu, naïve café; 你好,世界! 🦙🚀 👩‍👧",
    "THEY'RE we'll it's",
    "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n", "    def f(x):\n\treturn x**2\r\n\n\n", "", " ",
    "a\u00a0b\u200dc e\u0301", "\x00\x7f", "﷽ नमस्ते ไทย 한국어", "<repo_name>x<|endoftext|>", "abc123def",
]  # fmt: skip
NUMBERS = [" in 2024, 12 345.67", "  7", "1 2 12 ١٢٣", "ﬁ ½ Ⅷ"]


@pytest.mark.model
def test_c32_ids_of_the_embedded_model(embedded) -> None:
    """transformers reads this file's vocabulary but not its rule for digits, so numbers need that added."""
    _, own, theirs = embedded

    def compare(texts: list[str]) -> None:
        for text in texts:
            ids = own.encode(text).ids
            assert ids == theirs(text).input_ids, text
            assert own.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text

    compare(WORDS)
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    compare(WORDS + NUMBERS)


@pytest.mark.model
def test_c32_special_tokens_of_the_embedded_model(embedded) -> None:
    source, own, theirs = embedded
    assert (source.bos_token, source.eos_token, source.pad_token) == (
        theirs.bos_token, theirs.eos_token, theirs.pad_token
    )  # fmt: skip
    assert source.chat_template == theirs.chat_template and not source.add_bos and source.eos_ids == (2,)
    rendered = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert own.encode(rendered, add_special_tokens=False).ids[:2] == [1, own.token_to_id("system")]
