"""Random arrivals, aborts, pools, depths: each answer is what the request gets alone, and everything comes home."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from null_drive import NUM_LOGITS, CountingMask, Drive, alone, request

from tandem.errors import CapacityError
from tandem.request import Request

SOME_ENDS = tuple(range(0, NUM_LOGITS, 12))


@dataclass
class Guest:
    """A request, when it comes and goes (in rounds), and whether a grammar binds it."""

    request: Request
    comes: int
    goes: int | None
    delay: int | None

    def mask(self) -> CountingMask | None:
        return None if self.delay is None else CountingMask(self.delay)


@st.composite
def guests(draw: st.DrawFn) -> list[Guest]:
    found: list[Guest] = []
    for number in range(draw(st.integers(1, 7))):
        prefix = draw(st.sampled_from([[], [5] * 9, [6] * 33]))
        prompt = prefix + draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        max_tokens = draw(st.integers(1, 24))
        made = request(
            f"g{number}", prompt, max_tokens,
            eos=draw(st.sampled_from([(), SOME_ENDS])), priority=draw(st.integers(0, 2)),
            ignore_eos=draw(st.booleans()), min_tokens=draw(st.integers(0, min(3, max_tokens))),
            seed=draw(st.integers(0, 3)), logprobs=draw(st.sampled_from([None, None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])), salt=draw(st.sampled_from(["", "", "x"])),
            client=draw(st.sampled_from(["", "", "c", "d"])), bundle=draw(st.sampled_from(["", "1", "2"])),
        )  # fmt: skip
        goes = draw(st.none() | st.integers(0, 40)) if draw(st.booleans()) else None
        delay = draw(st.sampled_from([None, None, None, 0, 3, 12]))
        comes = draw(st.integers(0, 30))
        found.append(Guest(made, comes, goes, delay))
        for sibling in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
            twin = request(
                f"g{number}.{sibling}", prompt, max_tokens, seed=sibling + 10, fork_of=made.id, salt=made.salt,
                priority=made.priority, client=made.client, bundle=made.bundle,
            )  # fmt: skip
            found.append(Guest(twin, comes, draw(st.none() | st.integers(0, 40)), delay))
    return found


@given(
    guests(), st.integers(1, 4), st.sampled_from([1, 2, 4, 16]), st.integers(4, 120), st.integers(1, 6),
    st.integers(0, 40), st.booleans(), st.sampled_from(["fcfs", "priority"]),
)  # fmt: skip
@settings(deadline=None, max_examples=120)
def test_the_same_tokens_as_alone_whatever_happens(
    everyone: list[Guest], depth: int, block_size: int, num_slots: int, num_rows: int, spare: int, cache: bool,
    policy: str,
) -> None:  # fmt: skip
    num_blocks = -(-num_slots // block_size)
    drive = Drive(
        depth, num_blocks, block_size, num_rows, num_rows + spare, policy=policy, prefix_cache=cache, max_length=4096
    )  # fmt: skip
    masks = {}
    work = sum(len(guest.request.prompt) + guest.request.params.max_tokens for guest in everyone)  # type: ignore[misc]
    for turn in range(45):
        for guest in everyone:
            if guest.comes == turn:
                masks[guest.request.id] = mask = guest.mask()
                fits = len(guest.request.prompt) + guest.request.params.max_tokens - 1 <= num_blocks * block_size
                try:
                    drive.add(guest.request, mask=mask)
                    assert fits
                except CapacityError:
                    assert not fits
            elif guest.goes == turn and guest.request.id in drive.answers:
                drive.abort(guest.request.id)
        drive.turn()
    answers = drive.run(limit=200 + 60 * work)
    for guest in everyone:
        if guest.request.id in answers:
            _compare(guest, answers[guest.request.id])
    most = sum(-(-(len(g.request.prompt) + g.request.params.max_tokens) // block_size) for g in everyone)
    assert drive.scheduler.statistics().num_preemptions <= most


def _compare(guest, answer) -> None:  # type: ignore[no-untyped-def]
    want = alone(guest.request, guest.mask())
    assert answer.error is None and answer.cached < len(guest.request.prompt)
    if answer.finish == "abort":
        assert answer.tokens == want.tokens[: len(answer.tokens)]
        return
    assert (answer.tokens, answer.finish) == (want.tokens, want.finish)
    assert answer.logprobs == want.logprobs and answer.prompt_logprobs == want.prompt_logprobs
    params = guest.request.params
    assert len(answer.logprobs) == (len(answer.tokens) if params.logprobs is not None else 0)
    assert len(answer.prompt_logprobs) == (len(guest.request.prompt) if params.prompt_logprobs is not None else 0)
    if guest.delay is not None:
        assert [token % 7 for token in answer.tokens] == [i % 7 for i in range(len(answer.tokens))]
