"""Text to ids and back: one BOS, several threads, raw bytes of tokens, incremental decoding."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import SENTENCE_PIECES, byte_level, byte_level_text, ids_of, sentencepiece_text
from tokenizers import processors

from tandem.engine.detokenize import unfinished_bytes
from tandem.engine.text import Text
from tandem.errors import ContextLengthError, ModelError, RequestError

BYTES = byte_level_text([" world", "Hello", "日"])
PIECES = sentencepiece_text()


def pushed(text: Text, ids: list[int], prompt: list[int] = (), skip: bool = True) -> str:
    detokenizer = text.detokenizer(prompt, skip)
    pieces = [detokenizer.push(token) for token in ids]
    return "".join(pieces) + detokenizer.flush() + detokenizer.flush()


def test_c25_exactly_one_bos():
    """C25: with the tokenizer's own rule, with add_bos, with both, and for text that brings its own."""
    with_rule = byte_level()
    bos = with_rule.token_to_id("<s>")
    with_rule.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", bos)])
    for text in (
        byte_level_text(add_bos=True),
        Text(with_rule.to_str(), bos_id=bos),
        Text(with_rule.to_str(), bos_id=bos, add_bos=True),
    ):
        h, i = ids_of(text, ["h", "i"])
        assert text.encode("hi") == text.encode("<s>hi") == [bos, h, i]
        assert text.encode("") == [bos]
        # Rendered templates write their own.
        assert text.encode("<s>hi", add_special_tokens=False) == [bos, h, i]
        assert text.encode("hi", add_special_tokens=False) == [h, i]
    assert byte_level_text().encode("hi") == byte_level_text(bos_id=None, add_bos=True).encode("hi") == [h, i]


def test_c07_threads_give_what_one_gives():
    texts = [f"{i} naïve 日本語 <s> " * (i % 7 + 1) for i in range(64)]
    alone = [BYTES.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(BYTES.encode, texts)) == alone
        assert list(pool.map(BYTES.decode, alone)) == [BYTES.decode(ids) for ids in alone]


async def test_c07_a_long_text_leaves_the_event_loop_free():
    text = "a b naïve 日本語 " * 20_000
    gaps, running = [], True

    async def tick() -> None:
        last = time.perf_counter()
        while running:
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    ticking = asyncio.create_task(tick())
    ids = await BYTES.encode_async(text)
    running = False
    await ticking
    assert len(ids) > 100_000 and len(gaps) > 3 and max(gaps) < 0.2
    assert await BYTES.encode_async("Hello") == BYTES.encode("Hello")


def test_c07_a_text_that_cannot_fit_is_refused_before_the_work():
    began_s = time.perf_counter()
    with pytest.raises(ContextLengthError, match="limit is 100") as caught:
        BYTES.encode("x" * 2_000_000, max_tokens=100)
    assert time.perf_counter() - began_s < 0.1 and caught.value.code == "context_length_exceeded"
    assert len(BYTES.encode("x" * 100, max_tokens=100)) == 100


def test_lone_surrogates_are_refused():
    with pytest.raises(RequestError, match="surrogate"):
        BYTES.encode("a\ud800b")


def test_truncation_and_padding_of_the_file_are_off():
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10)
    assert len(Text(tokenizer.to_str()).encode("hello")) == 5
    with pytest.raises(ModelError, match="tokenizer"):
        Text("{}")


def test_token_bytes_and_text():
    for text in (BYTES, PIECES):
        ids = text.encode("Hello naïve 日本語 👩‍🚀", add_special_tokens=False)
        joined = b"".join(text.token_bytes(token) for token in ids).decode()
        assert joined.lstrip(" ") == "Hello naïve 日本語 👩‍🚀"
        assert text.token_bytes(10**6) == text.token_bytes(-1) == b"" and text.token_text(10**6) == ""
    assert BYTES.token_text(ids_of(BYTES, [" world"])[0]) == " world"
    assert PIECES.token_bytes(3 + 0xF0) == b"\xf0" and PIECES.token_text(3 + 0xF0) == "\ufffd"
    assert BYTES.token_text(BYTES.bos_id) == "<s>" and BYTES.is_special(BYTES.bos_id)
    assert BYTES.num_tokens == 256 + 3 + 3


def test_c11_characters_across_tokens():
    """C11 (i): emoji, accents and kanji, one id a byte; nothing broken is ever given out."""
    whole = "Hi 👩‍🚀 naïve 日本語"
    for text in (BYTES, PIECES):
        ids = text.encode(whole, add_special_tokens=False)
        detokenizer = text.detokenizer()
        pieces = [detokenizer.push(token) for token in ids]
        assert "".join(pieces) == text.decode(ids) == whole and detokenizer.flush() == ""
        assert not any("\ufffd" in piece for piece in pieces)


def test_c11_the_first_space_stays():
    """C11 (ii): sentencepiece words after a prompt keep their space; special tokens between do not eat it."""
    hello = ids_of(PIECES, ["▁Hello"])
    words = ids_of(PIECES, ["▁world", "▁is", "▁big"])
    assert pushed(PIECES, words, hello) == " world is big"
    assert pushed(PIECES, words, [1, *hello, 2]) == " world is big"
    assert pushed(PIECES, [words[0], 2, words[1]], hello) == " world is"
    assert pushed(PIECES, words) == PIECES.decode(words) == "world is big"
    assert pushed(PIECES, ids_of(PIECES, ["▁", "▁world"])) == PIECES.decode(ids_of(PIECES, ["▁", "▁world"]))


def test_c11_impossible_bytes_survive():
    """C11 (iii): a lone 0x80 leaves at once and what follows is intact."""
    for text, start in ((PIECES, 3), (BYTES, None)):
        lone = start + 0x80 if start else byte_id(0x80)
        after = ids_of(text, ["a", "b"])
        assert pushed(text, [lone, *after]) == text.decode([lone, *after]) == "\ufffdab"
        detokenizer = text.detokenizer()
        assert detokenizer.push(lone) == "\ufffd"


def test_c11_an_unfinished_tail_is_flushed_once():
    """C11 (iv): cut inside the emoji."""
    for text in (BYTES, PIECES):
        ids = text.encode("Hi 👩", add_special_tokens=False)[:-1]
        detokenizer = text.detokenizer()
        body = "".join(map(detokenizer.push, ids))
        assert body == "Hi "
        assert body + detokenizer.flush() == text.decode(ids)
        assert detokenizer.flush() == ""


def byte_id(byte: int) -> int:
    return next(token for token in range(256) if BYTES.token_bytes(token) == bytes((byte,)))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_increments_equal_decoding_the_whole(data):
    """Byte-level: any ids at all, broken bytes included, relative to any prompt of whole characters."""
    prompt = BYTES.encode(data.draw(st.text(max_size=8)), add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, BYTES.num_tokens + 3), max_size=30))
    skip = data.draw(st.booleans())
    whole = BYTES.decode([*prompt, *ids], skip)
    assert pushed(BYTES, ids, prompt, skip) == whole[len(BYTES.decode(prompt, skip)) :]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_increments_equal_decoding_the_whole_with_pieces(data):
    """Sentencepiece: any sequence of pieces, special tokens and whole characters given as bytes."""
    units = st.one_of(
        st.sampled_from(range(259, 259 + len(SENTENCE_PIECES))).map(lambda i: [i]),
        st.sampled_from([[1], [2]]),
        st.characters(codec="utf-8").map(lambda c: [3 + byte for byte in c.encode()]),
    )
    prompt = list(chain(*data.draw(st.lists(units, min_size=1, max_size=12))))
    ids = list(chain(*data.draw(st.lists(units, max_size=15))))
    for start in ([], prompt):
        whole = PIECES.decode([*start, *ids])
        assert pushed(PIECES, ids, start) == whole[len(PIECES.decode(start)) :]


def test_a_prompt_that_ends_inside_a_character():
    first, *rest = BYTES.encode("é", add_special_tokens=False)
    assert pushed(BYTES, rest, [first]) == "é"
    assert pushed(BYTES, BYTES.encode("x"), [first]) == "x"


def test_many_special_or_broken_ids_cost_no_more_each():
    """Held-back ids do not pile up: 20,000 ids without text, or without a character, take no quadratic time."""
    began_s = time.perf_counter()
    for text, token in ((BYTES, BYTES.bos_id), (PIECES, 2), (BYTES, byte_id(0x80)), (BYTES, 10**6)):
        pushed(text, [token] * 20_000)
    assert time.perf_counter() - began_s < 5


@pytest.mark.parametrize(
    ("data", "wanted"),
    [(b"", 0), (b"a", 0), (b"\x80", 0), (b"\xc3", 1), (b"\xe2\x82", 2), (b"\xe2\x82\xac", 0), (b"\xf0\x9f\x98", 3),
     (b"\xf0\x9f\x98\x80", 0), (b"\xff", 0), (b"\xc0", 0), (b"\xe0\x80", 0), (b"\xed\xa0", 0), (b"\xf4\x90", 0)],
)  # fmt: skip
def test_unfinished_bytes(data, wanted):
    assert unfinished_bytes(data) == wanted
