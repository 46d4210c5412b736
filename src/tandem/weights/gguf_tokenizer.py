"""The tokenizer of a GGUF file as a tokenizer.json. It knows vocabularies and splitting rules, not tensors.

Two kinds exist in the files: "gpt2", byte-level BPE with a named rule for splitting text first, and "llama", the
BPE of SentencePiece with scores and byte tokens. Splitting rules are those of the models' own tokenizer.json.
"""

import json
from typing import Any

from tandem.errors import WeightsError
from tandem.weights.gguf import GGUF

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]
_LLAMA3 = {"split": [_CL100K.format(digits="{1,3}")], "ignore_merges": True, "add_bos": True}
_QWEN2 = {"split": [_CL100K.format(digits="")], "nfc": True}
_DIGITS = {"split": [r"\p{N}", _GPT2]}

# tokenizer.ggml.pre: how text is split before merging, and what the model's own tokenizer does besides.
PRE: dict[str, dict[str, Any]] = {
    "default": {"split": _DEFAULT},
    "gpt-2": {"split": [_GPT2]},
    "gpt2": {"split": [_GPT2]},
    "mpt": {"split": [_GPT2]},
    "olmo": {"split": [_GPT2]},
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "dbrx": {"split": [_CL100K.format(digits="{1,3}")]},
    "tekken": {"split": [_TEKKEN], "ignore_merges": True, "add_bos": True},
}


def gguf_tokenizer(gguf: GGUF) -> str | None:
    """A tokenizer.json for `tokenizers.Tokenizer.from_str`, or None when the file holds no tokenizer.

    Raises WeightsError for a kind or splitting rule that is not known: guessing would give other ids silently.
    """
    if "tokenizer.ggml.model" not in gguf.metadata:
        return None
    kind = gguf.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise WeightsError(
            f"{gguf.path}: the tokenizer kind {kind!r} is not supported; gpt2 and llama are.",
            hint="name a folder with the model's tokenizer.json with --tokenizer.",
        )
    tokens, types = _vocabulary(gguf)
    parts = _byte_level(gguf, tokens) if kind == "gpt2" else _sentencepiece(gguf, tokens, types)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(i, tokens[i], types[i]) for i in _added_ids(types)],
            "post_processor": _post_processor(gguf, tokens),
            **parts,
        }
    )


def adds_bos(gguf: GGUF) -> bool:
    """Whether the model wants its BOS before a plain prompt: as the file says, else as the kind's habit is."""
    default = gguf.metadata.get("tokenizer.ggml.model") == "llama" or _rule(gguf).get("add_bos", False)
    return bool(gguf.metadata.get("tokenizer.ggml.add_bos_token", default)) and bos_id(gguf) is not None


def bos_id(gguf: GGUF) -> int | None:
    default = 1 if gguf.metadata.get("tokenizer.ggml.model") == "llama" else None
    return gguf.metadata.get("tokenizer.ggml.bos_token_id", default)


def _rule(gguf: GGUF) -> dict[str, Any]:
    return PRE.get(gguf.metadata.get("tokenizer.ggml.pre", "default"), {})


def _vocabulary(gguf: GGUF) -> tuple[list[str], list[int]]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise WeightsError(f"{gguf.path}: the tokenizer has no tokens.")
    types = gguf.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(f"{gguf.path}: {len(tokens)} tokens, and types for {len(types)}.")
    seen: set[str] = set()
    unique = []
    for token_id, token in enumerate(tokens):
        # A second token of the same text can never be produced; a name of its own keeps the other ids in place.
        unique.append(f"<duplicate {token_id}>" if token in seen else token)
        seen.add(token)
    return unique, types


def _added_ids(types: list[int]) -> list[int]:
    return [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER)]


def _added(token_id: int, token: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, "special": kind == _CONTROL, **flags}


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    base = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return base | options | {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}


def _byte_level(gguf: GGUF, tokens: list[str]) -> dict[str, Any]:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE:
        raise WeightsError(
            f"{gguf.path}: the pre-tokenizer {name!r} is not known; these are: {', '.join(sorted(PRE))}.",
            hint="name a folder with the model's tokenizer.json with --tokenizer.",
        )
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise WeightsError(f"{gguf.path}: the byte-level tokenizer has no merges.")
    # Only the first character of a pair's left side may itself be a space.
    pairs = [[merge[:at], merge[at + 1 :]] for merge in merges for at in (merge.find(" ", 1),)]
    rule = PRE[name]
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule["split"]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix"):
        byte_level["add_prefix_space"] = True
    return {
        "normalizer": {"type": "NFC"} if rule.get("nfc") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, pairs, ignore_merges=rule.get("ignore_merges", False)),
    }


def _sentencepiece(gguf: GGUF, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise WeightsError(f"{gguf.path}: the SentencePiece tokenizer needs a score for each of {len(tokens)} tokens.")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = gguf.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
        if prefix
        else spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens, score_merges(tokens, scores, types), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        ),
    }


def score_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    """The merges that SentencePiece's BPE would do, best score first: each way to make a token from two others."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER, _UNUSED)}
    ranked = []
    for token, token_id in ids.items():
        for at in range(1, len(token)):
            left = ids.get(token[:at])
            if left is not None and (right := ids.get(token[at:])) is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort()
    return [[tokens[left], tokens[right]] for _, _, left, right in ranked]


def _post_processor(gguf: GGUF, tokens: list[str]) -> dict[str, Any] | None:
    bos = bos_id(gguf) if adds_bos(gguf) else None
    eos = gguf.metadata.get("tokenizer.ggml.eos_token_id")
    eos = eos if gguf.metadata.get("tokenizer.ggml.add_eos_token") else None
    if bos is None and eos is None:
        return None

    def special(token_id: int | None, kind: int) -> list[dict[str, Any]]:
        return [] if token_id is None else [{"SpecialToken": {"id": tokens[token_id], "type_id": kind}}]

    def sequence(letter: str, kind: int) -> list[dict[str, Any]]:
        return [*special(bos, kind), {"Sequence": {"id": letter, "type_id": kind}}, *special(eos, kind)]

    used = {i for i in (bos, eos) if i is not None}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in sorted(used)},
    }
