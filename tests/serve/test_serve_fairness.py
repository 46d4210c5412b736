"""Clients beside a client that asks for much: they have room in the server, and their turn."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from serve_drive import Served, serving

from tandem.errors import SettingError
from tandem.serve.guard import client_of
from tandem.serve.options import ServeOptions

COMPLETIONS = "/v1/completions"
OTHER = {"authorization": "Bearer other"}
LONG = {"max_tokens": 200, "ignore_eos": True, "stream": True}


@contextmanager
def asking(served: Served, *bodies: dict[str, Any]) -> Iterator[None]:
    """Streams of the first key's client, begun and not read on."""
    with ExitStack() as stack:
        for body in bodies:
            answer = stack.enter_context(served.http.stream("POST", COMPLETIONS, json={**LONG, **body}))
            assert answer.status_code == 200, answer.read()
        yield


def test_one_request_takes_a_quarter_of_the_server_and_one_client_leaves_an_eighth() -> None:
    with serving(ServeOptions(max_requests=64), keys=("first", "other"), max_model_len=256, step_s=0.002) as served:
        error = served.refused(COMPLETIONS, {"prompt": ["a"] * 17}, param="prompt")
        assert "the limit is 16" in error["message"] and "hint: send several requests" in error["message"]
        with asking(served, *({"prompt": ["a"] * 14} for _ in range(4))):
            now = served.statistics()
            assert (now["requests"], now["answers"], now["clients"]) == (4, 56, 1)
            error = served.refused(COMPLETIONS, {"prompt": "a"}, status=429)
            assert error["code"] == "queue_full" and "56" in error["message"] and "8 are kept" in error["message"]
            assert served.post(COMPLETIONS, {"prompt": "a", "n": 8, "max_tokens": 1}, headers=OTHER).status_code == 200
            assert served.refused(COMPLETIONS, {"prompt": "a", "n": 9}, status=429, headers=OTHER)
        now = served.at_rest()
        assert (now["answers"], now["clients"]) == (0, 0) and not served.service.clients


def test_prompt_tokens_are_kept_for_others_too() -> None:
    options = ServeOptions(max_queued_tokens=400)
    with serving(options, keys=("first", "other"), max_model_len=512, step_s=0.002) as served:
        with asking(served, {"prompt": [5] * 250}):
            error = served.refused(COMPLETIONS, {"prompt": [5] * 101}, status=429)
            assert "50 are kept" in error["message"]
            assert served.post(COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 1}, headers=OTHER).status_code == 200
            served.refused(COMPLETIONS, {"prompt": [5] * 151}, status=429, headers=OTHER)
        served.at_rest()


def test_five_tokens_beside_thirty_requests_of_sixteen_prompts() -> None:
    """Behind a row that comes free; the same client's next request behind one answer of each of the thirty."""
    with serving(keys=("first", "other"), max_model_len=256, max_num_seqs=8, step_s=0.002) as served:
        crowd = [{"prompt": [[5, i, j] for j in range(16)], "max_tokens": 20} for i in range(30)]
        few = {"prompt": [7] * 20, "max_tokens": 5, "ignore_eos": True}
        with asking(served, *crowd):
            for headers, most in ((OTHER, 24), ({}, 60)):
                before = sum(served.service.meter.num_finished.values())
                answer = served.post(COMPLETIONS, few, headers=headers)
                assert answer.json()["usage"]["completion_tokens"] == 5
                passed = sum(served.service.meter.num_finished.values()) - before
                assert passed <= most, f"{passed} answers ended before it"
        served.at_rest()


def test_many_answers_of_one_request_do_not_hold_every_row_before_others() -> None:
    with serving(max_model_len=256, max_num_seqs=4, step_s=0.002) as served:
        with asking(served, {"prompt": [[5, i] for i in range(128)], "n": 2, "max_tokens": 20}):
            served.complete([7, 8, 9], max_tokens=5, ignore_eos=True)  # the shortest would come first anyway
            assert sum(served.service.meter.num_finished.values()) < 32  # most of the crowd wait still
        served.at_rest()


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::5", "2001:db8:1:2::/64"), ("", ""), ("unix", "unix"),
    ],
)  # fmt: skip
def test_a_client_without_a_key_is_its_address(host: str, client: str) -> None:
    assert client_of({"type": "http", "client": (host, 5)}) == client
    assert client_of({"type": "http", "client": (host, 5), "tandem.client": "key 1"}) == "key 1"
    assert client_of({"type": "http", "client": None}) == ""


def test_the_shares_are_the_operators() -> None:
    assert ServeOptions().limits.max_answers == 256
    assert ServeOptions(max_requests=20).limits.max_answers == 16
    assert ServeOptions(max_requests=20, max_answers=500).limits.max_answers == 500
    with pytest.raises(SettingError, match="client_reserve"):
        ServeOptions(client_reserve=1.5)
