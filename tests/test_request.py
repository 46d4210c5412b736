"""What a user asks, as plain values: each field takes what is clear and refuses the rest by name."""

from fractions import Fraction

import numpy as np
import pytest

from tandem.errors import RequestError
from tandem.request import MAX_SALT_LENGTH, Constraint, Request, SamplingParams


class Name(str):
    """A string of some library's own class."""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5), ("stop", b"x"), ("stop", {"a": 1}), ("stop", ["a", 5]), ("stop", [""]), ("stop", "\ud800"),
        ("stop", np.array(5)), ("stop_token_ids", 5), ("stop_token_ids", "12"), ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]), ("stop_token_ids", [2**63]), ("logit_bias", 5), ("logit_bias", {5: None}),
        ("logit_bias", {"5": 1.0}), ("logit_bias", {5: "1"}), ("logit_bias", {5: 101}), ("logit_bias", [(1, 2, 3)]),
        ("logit_bias", [7]), ("logit_bias", {5: float("nan")}), ("constraint", "x"), ("constraint", {"regex": "a"}),
        ("ignore_eos", "yes"), ("ignore_eos", 1), ("ignore_eos", None), ("include_stop_str_in_output", "no"),
        ("skip_special_tokens", 0), ("temperature", "hot"), ("temperature", None), ("temperature", True),
        ("temperature", 10**400), ("top_p", 0), ("top_k", 1.5), ("n", 0), ("n", None), ("seed", 2**63),
        ("seed", "1"), ("max_tokens", 0), ("min_tokens", 2**63), ("logprobs", True),
        ("logprobs", 21), ("prompt_logprobs", -1),
    ],
)  # fmt: skip
def test_a_field_that_makes_no_sense_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and field in caught.value.what and len(caught.value.what) < 250


def test_a_number_too_long_to_be_written_is_refused_as_any_other() -> None:
    huge = 10**5000
    for field in ("n", "max_tokens", "min_tokens", "seed", "temperature"):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: huge})
    with pytest.raises(RequestError, match="token id"):
        Request("r", [huge], SamplingParams()).check(100, 100)


def test_none_means_none_of_them() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_numbers_and_lists_of_other_libraries_become_plain() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=Fraction(1, 2), min_p=0, top_k=np.int64(4), n=np.uint8(2), seed=np.int32(-3),
        max_tokens=np.int16(9), min_tokens=np.int8(1), logprobs=np.int64(2), stop=[Name("a")],
        stop_token_ids=np.array([5, 6]), logit_bias={np.int64(3): np.float64(1.5)},
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_p=0.5, top_k=4, n=2, seed=-3, max_tokens=9, min_tokens=1, logprobs=2, stop=("a",),
        stop_token_ids=(5, 6), logit_bias=((3, 1.5),),
    )  # fmt: skip
    kinds = {type(getattr(params, name)) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    assert kinds == {float}
    numbers = [params.top_k, params.n, params.seed, params.max_tokens, params.logprobs, *params.stop_token_ids]
    assert {type(number) for number in numbers} == {int}
    assert type(params.stop[0]) is str and [type(part) for part in params.logit_bias[0]] == [int, float]
    assert SamplingParams(logit_bias=[[3, 1]]).logit_bias == ((3, 1.0),)


@pytest.mark.parametrize("fields", [{"kind": 5, "text": ""}, {"kind": "regex", "text": None}])
def test_a_constraint_is_text(fields: dict) -> None:
    with pytest.raises(RequestError, match="constraint"):
        Constraint(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "x"), ("priority", 1.0), ("priority", True), ("priority", None), ("priority", 2**63),
        ("salt", 5), ("salt", None), ("salt", b"x"), ("salt", "\udc80"),
        ("salt", "x" * (MAX_SALT_LENGTH + 1)),
    ],
)  # fmt: skip
def test_a_request_with_what_is_compared_with_others_is_checked_when_made(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        Request("r", [1], SamplingParams(), **{field: value})
    assert caught.value.param == field
    request = Request("r", [1], SamplingParams(), priority=np.int64(-(2**63)), salt=Name("a"))
    assert type(request.priority) is int and type(request.salt) is str
