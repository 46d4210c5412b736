"""text_offset: where each token stands in the returned text, in characters, however characters are cut into tokens."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve_drive import Served, serving

from tandem.serve.logprobs import Offsets, prompt_places

COMPLETIONS = "/v1/completions"
TEXT = "Hi 👩‍🚀 naïve 日本語!"


def places_of(pieces: list[bytes], start: int = 0, before: bytes = b"") -> list[int]:
    return Offsets(lambda token: pieces[token], start, before).of(range(len(pieces)))


@given(
    st.text(st.sampled_from("a é日👩\U0001f680�"), max_size=12), st.lists(st.integers(0, 48), max_size=12),
    st.integers(0, 9),
)  # fmt: skip
@example("👩", [1, 2, 3], 0)
@settings(deadline=None, max_examples=200)
def test_the_place_of_a_token_is_that_of_the_character_with_its_first_byte(text, cuts, start) -> None:
    data = text.encode()
    characters = [place for place, character in enumerate(text) for _ in character.encode()] + [len(text)]
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert places_of(pieces, start) == [start + characters[edge] for edge in edges[:-1]]
    # the same if the first part belongs to the prompt: only what is unfinished there is gone on with
    for cut in range(len(pieces)):
        before = b"".join(pieces[:cut])
        shown = len(before.decode(errors="ignore"))
        assert places_of(pieces[cut:], shown, before) == [characters[edge] for edge in edges[cut:-1]]


def test_broken_characters_and_tokens_without_text() -> None:
    assert places_of([b"\xf0\x9f", b"a", b"b"]) == [0, 1, 2]
    assert places_of([b"\x80", b"\xf0", b"\xf0\x9f", b"\x91\xa9", b"x"]) == [0, 1, 2, 2, 3]
    assert places_of([b"a", b"", b"\xe6\x97", b"", b"\xa5", b"z"]) == [0, 1, 1, 1, 1, 2]


def lists_of(served: Served, **fields) -> tuple[str, dict]:
    """(text, logprobs), the same whole and streamed."""
    choice = served.complete(logprobs=0, **fields)["choices"][0]
    text, lists = choice["text"], choice["logprobs"]
    if not fields.get("echo"):
        streamed: dict = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
        for event in served.events(COMPLETIONS, {"logprobs": 0, **fields})[:-1]:
            for name, values in (event["choices"][0]["logprobs"] or {}).items():
                streamed[name] += values
        assert streamed == lists
    assert lists["text_offset"] == sorted(lists["text_offset"])
    return text, lists


def test_over_http_whole_streamed_and_echoed() -> None:
    with serving(script=TEXT, max_model_len=256) as served:
        bytes_before = [place for place, character in enumerate(TEXT) for _ in character.encode()]
        text, lists = lists_of(served, prompt="hé", max_tokens=100)
        assert text == TEXT
        # one token a byte; the last is the end of sequence, which stands behind the text
        assert lists["text_offset"] == [*bytes_before, len(TEXT)]
        echoed, lists = lists_of(served, prompt="hé", max_tokens=100, echo=True)
        assert echoed == "hé" + TEXT
        assert lists["text_offset"] == [0, 1, 1, *(2 + place for place in bytes_before), 2 + len(TEXT)]
        stopped, lists = lists_of(served, prompt="hé", max_tokens=100, stop=["naï"])
        assert stopped == TEXT[:7] and max(lists["text_offset"]) <= 9
        assert lists["text_offset"] == bytes_before[: len(lists["text_offset"])]
        cut, lists = lists_of(served, prompt="hé", max_tokens=5)
        assert cut == "Hi �" and lists["text_offset"] == [0, 1, 2, 3, 3]


def test_a_begin_token_and_special_tokens_take_no_place() -> None:
    with serving(script="ab", source={"add_bos": True}, max_model_len=256) as served:
        text, lists = lists_of(served, prompt="hi", max_tokens=9, echo=True)
        assert text == "hiab" and lists["text_offset"] == [0, 0, 1, 2, 3, 4]
        ids = served.complete("<bos>é", echo=True, max_tokens=9, logprobs=0, return_token_ids=True)
        choice = ids["choices"][0]
        assert choice["text"] == "<bos>éab" and choice["logprobs"]["text_offset"] == [0, 5, 5, 6, 7, 8]
        choice = served.complete(ids["prompt_token_ids"], echo=True, max_tokens=9, logprobs=0)["choices"][0]
        assert choice["text"] == "éab" and choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2, 3]


def test_a_prompt_that_ends_within_a_character() -> None:
    with serving(script="👩x", max_model_len=256) as served:
        tokens = served.post("/tokenize", {"prompt": "a👩"}).json()["tokens"]
        choice = served.complete(tokens[:3], echo=True, max_tokens=1, logprobs=0)["choices"][0]
        assert choice["logprobs"]["text_offset"][:3] == [0, 1, 1]
        assert all(0 <= place <= len(choice["text"]) for place in choice["logprobs"]["text_offset"])


def test_the_space_before_the_first_word_of_sentencepiece_takes_no_place() -> None:
    class Pieces:
        table = (b"<s>", b" Hello", b" world", b"!")

        def visible_bytes(self, skip: bool):
            return lambda token: b"" if skip and token == 0 else self.table[token]

        def token_text(self, token: int) -> str:
            return self.table[token].decode()

        token_bytes = table.__getitem__

    assert list(prompt_places(Pieces(), [0, 1, 2, 3], "Hello world!", as_written=True)) == [0, 0, 5, 11]
    assert list(prompt_places(Pieces(), [0, 1, 2], "Hello world", as_written=False)) == [0, 0, 5]
    assert list(prompt_places(Pieces(), [0, 1, 2], "<s> Hello world", as_written=True)) == [0, 3, 9]
