"""From changes to updates: stop strings across tokens, ends, and the equality of streams and whole answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_level_text, ids_of, sentencepiece_text

from tandem.engine.contract import Update
from tandem.engine.output import OutputStream, assemble
from tandem.engine.stops import StopFinder
from tandem.engine.text import Text
from tandem.errors import RequestError
from tandem.request import Change, Completion, SamplingParams, TokenLogprobs

WORDS = ["ABC", " DE", "GHI", " KLM", "\n\n\n", "Hi ", "bcd"]
TEXT = byte_level_text(WORDS)
EOS = next(iter(TEXT.eos_ids))
SCRIPT = ["ABC", " DE", "F", "GHI", "J", " KLM"]


def run(
    pieces: list[str] | list[int], text: Text = TEXT, prompt: list[int] = (), finish="length", group=1, logprobs=False,
    **params,
) -> tuple[list[Update], Completion]:  # fmt: skip
    """Push a script, `group` tokens a change, until the stream has enough."""
    ids = ids_of(text, pieces) if pieces and isinstance(pieces[0], str) else list(pieces)
    output, twin = (OutputStream(SamplingParams(**params), text, prompt) for _ in range(2))
    updates = []
    for start in range(0, len(ids), group):
        part = ids[start : start + group]
        entries = [TokenLogprobs(token, -0.5, 1, ()) for token in part] if logprobs else None
        ends = finish if start + group >= len(ids) else None
        update = output.push(Change("a", part, ends, logprobs=entries))
        is_token = len(part) == 1 and ends is None and entries is None
        change = Change("a", part, ends, logprobs=entries)
        assert update == (twin.push_token(part[0]) if is_token else twin.push(change)), "a token's own way is another"
        if update is not None:
            updates.append(update)
        if output.stopped:
            break
    assert output.push(Change("a", (1,))) is None, "nothing may follow the finish"
    finishes = [update.finish for update in updates]
    assert finishes[-1] is not None and not any(finishes[:-1]), "the last update, and only it, has a finish"
    return updates, assemble(updates)


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize(
    ("stops", "include", "text", "num_tokens", "stop"),
    [
        (["EFG"], False, "ABC D", 4, "EFG"),
        (["EFG"], True, "ABC DEFG", 4, "EFG"),
        (["GHI", "FG"], False, "ABC DE", 4, "FG"),
        (["GHI", "FG"], True, "ABC DEFG", 4, "FG"),
        (["KLMN", "JX"], False, "ABC DEFGHIJ KLM", 6, None),
        (["A"], False, "", 1, "A"),
    ],
)
def test_c15_stops_across_tokens(stops, include, text, num_tokens, stop, group):
    """C15: a stop that lies across tokens; the earliest wins; nothing of it was given out; all tokens count."""
    updates, completion = run(SCRIPT, stop=stops, include_stop_str_in_output=include, group=group)
    assert (completion.text, completion.stop) == (text, stop)
    assert completion.finish_reason == ("stop" if stop else "length")
    assert len(completion.token_ids) == num_tokens
    assert [update.finish for update in updates[:-1]] == [None] * (len(updates) - 1)


def test_c15_only_a_possible_prefix_is_held_back():
    updates, _ = run(SCRIPT, stop=["EFX"])
    assert [update.text for update in updates] == ["ABC", " D", "", "EFGHI", "J", " KLM"]
    updates, _ = run(SCRIPT)
    assert [update.text for update in updates] == SCRIPT


def test_c15_newlines_inside_one_token():
    _, completion = run(["ABC", "\n\n\n", "J"], stop=["\n\n"])
    assert (completion.text, len(completion.token_ids)) == ("ABC", 2)


def test_c15_the_prompt_never_matches():
    prompt = ids_of(TEXT, ["ABC", " DE"])
    _, completion = run(["F", "GHI"], prompt=prompt, stop=["EFG", "ABC", "E"])
    assert completion.text == "FGHI"


def test_c15_an_empty_stop_is_refused():
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop=("",))


@pytest.mark.parametrize("group", [1, 3, 10])
def test_c16_min_tokens_lets_early_stops_pass(group):
    """C16: text `a\\nb`, 4 completion tokens."""
    _, completion = run(["a", "\n", "b", "\n", "c", "\n"], stop=["\n"], min_tokens=3, max_tokens=10, group=group)
    assert (completion.text, len(completion.token_ids), completion.finish_reason) == ("a\nb", 4, "stop")


def test_c16_wrong_values_are_refused():
    for values in ({"min_tokens": 5, "max_tokens": 4}, {"min_tokens": -1}):
        with pytest.raises(RequestError, match="min_tokens"):
            SamplingParams(**values)


@pytest.mark.parametrize("group", [1, 4, 100])
def test_c11_stream_equals_whole(group):
    """C11: the four inputs, stream and non-stream, byte-level and sentencepiece."""
    pieces = sentencepiece_text()
    for text in (TEXT, pieces):
        ids = text.encode("Hi 👩‍🚀 naïve 日本語", add_special_tokens=False)
        assert run(ids, text, group=group)[1].text == text.decode(ids)
        cut = text.encode("Hi 👩", add_special_tokens=False)[:-1]
        updates, completion = run(cut, text, group=group)
        assert completion.text == text.decode(cut) and completion.text.startswith("Hi \ufffd")
        assert len(completion.token_ids) == len(cut)
        assert all("\ufffd" not in update.text for update in updates[:-1])
    hello = ids_of(pieces, ["▁Hello"])
    words = ids_of(pieces, ["▁world", "▁is", "▁big"])
    assert run(words, pieces, hello, group=group)[1].text == " world is big"


def test_ends():
    """End-of-sequence has no text unless special tokens are shown; a stop id only when it is to be included."""
    ids = [*ids_of(TEXT, ["ABC"]), EOS]
    assert run(ids, finish="stop")[1].text == "ABC" and run(ids, finish="stop")[1].stop is None
    assert run(ids, finish="stop", skip_special_tokens=False)[1].text == "ABC</s>"
    assert run(ids, finish="stop")[1].token_ids == ids
    j = ids_of(TEXT, ["ABC", "J"])
    completion = run(j, finish="stop", stop_token_ids=(j[1],))[1]
    assert (completion.text, completion.stop, completion.finish_reason) == ("ABC", j[1], "stop")
    assert run(j, finish="stop", stop_token_ids=(j[1],), include_stop_str_in_output=True)[1].text == "ABCJ"
    # With ignore_eos the token comes in the middle, and leaves no text either.
    assert run([ids[0], EOS, ids[0]], ignore_eos=True)[1].text == "ABCABC"
    plain = Text(TEXT.json, eos_ids=[j[1]])
    assert run(j, plain, finish="stop")[1].text == "ABC", "also where it is an ordinary token"


def test_an_end_before_min_tokens_of_stops_flushes_everything():
    updates, completion = run(["ABC", " DE"], stop=["EFG"], finish="length")
    assert [update.text for update in updates] == ["ABC", " DE"] and completion.finish_reason == "length"
    output = OutputStream(SamplingParams(stop=("EFG",)), TEXT, ())
    output.push(Change("a", ids_of(TEXT, [" DE"])))
    last = output.push(Change("a", (), "abort"))
    assert last is not None and (last.text, last.finish, last.token_ids) == ("E", "abort", [])


def test_a_stop_completed_by_the_flush_still_stops():
    tail = TEXT.encode("é", add_special_tokens=False)[:1]
    _, completion = run([*ids_of(TEXT, ["a"]), *tail], stop=["\ufffd"])
    assert (completion.text, completion.stop) == ("a", "\ufffd")


def test_logprobs_follow_the_tokens():
    _, completion = run(SCRIPT, stop=["FG"], logprobs=True, group=6)
    assert len(completion.logprobs) == len(completion.token_ids) == 4
    assert run(SCRIPT)[1].logprobs is None


def test_prompt_logprobs_and_cached_tokens_come_with_the_first_update():
    output = OutputStream(SamplingParams(prompt_logprobs=0), TEXT, (1, 2, 3))
    entries = [TokenLogprobs(token, None if token == 1 else -1.0, 1, ()) for token in (1, 2, 3)]
    assert output.push(Change("a", prompt_logprobs=entries[:1], cached=2)) is None
    first = output.push(Change("a", (5,), prompt_logprobs=entries[1:]))
    second = output.push(Change("a", (6,), "length"))
    assert first.prompt_logprobs == entries and first.cached == second.cached == 2
    assert second.prompt_logprobs is None and (first.finish, second.finish) == (None, "length")


TEXTS = st.text(alphabet="abc", max_size=12)


def by_definition(text: str, stops: list[str], include: bool, free_from: int) -> str:
    """Grow the text character by character; end at the first that completes a stop, the longest if several."""
    for end in range(free_from + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))]
    return text


@settings(deadline=None, max_examples=300)
@given(
    TEXTS, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans(), st.data()
)
def test_stops_do_not_depend_on_the_pieces(text, stops, include, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    free = data.draw(st.sampled_from([0, *cuts]))
    finder, released, end = StopFinder(stops, include), "", by_definition(text, stops, include, free)
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        released += finder.push(text[start:stop], may_stop=start >= free)
        assert end.startswith(released), "a part of a stop was released"
        if finder.match is not None:
            break
    else:
        released += finder.flush()
    assert released == end
