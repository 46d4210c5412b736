"""Grammars over a tokenizer of one token a byte."""

import time
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.request import Constraint
from tandem.sampling.grammar import GrammarLimits, GrammarMask, compile_constraint

EOS = 256
NUM_LOGITS = 300  # 257 tokens and padding


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


TOKENIZER = byte_tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str()


def compiled(kind: str, text: str, **limits) -> GrammarMask:
    return compile_constraint(
        Constraint(kind, text), TOKENIZER_JSON, NUM_LOGITS, [EOS], GrammarLimits(**limits) if limits else None
    )


def wait(mask: GrammarMask) -> bytes:
    deadline_s = time.perf_counter() + 10
    while (bits := mask.allowed()) is None:
        assert time.perf_counter() < deadline_s
        time.sleep(0.001)
    return bits


def allowed_ids(mask: GrammarMask) -> set[int]:
    bits = wait(mask)
    assert len(bits) == 4 * ((NUM_LOGITS + 31) // 32)
    return {i for i in range(8 * len(bits)) if bits[i >> 3] >> (i & 7) & 1}


def accepts(mask: GrammarMask, text: str) -> bool:
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        if token not in allowed_ids(mask):
            return False
        mask.accept([token])
    return EOS in allowed_ids(mask)


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
