"""A failure that nobody expected: 500 for its request, one traceback in the log, and no word of what clients sent."""

import json
import logging
from pathlib import Path

import httpx
import pytest
import serve_drive
from front_drive import client_of, serving

from tandem.cli import _PlainFormatter, main
from tandem.errors import RequestError, TandemError
from tandem.serve import reply
from tandem.serve.failure import report, trace_of
from tandem.serve.options import ServeOptions

SECRET = "a prompt that nobody else may see"
KEY = "sk-very-secret"


def broken(*_: object, **__: object) -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError(f"no place for {SECRET} and {KEY}") from error


def shown(caplog: pytest.LogCaptureFixture) -> str:
    """The log as ``tandem serve`` prints it, where no debugging is asked for."""
    plain = _PlainFormatter("%(levelname)s %(name)s: %(message)s")
    return "\n".join(map(plain.format, caplog.records))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_logged_once_with_its_traceback(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_DEBUG", raising=False)
    monkeypatch.setattr(reply.Reply, "envelope", broken)
    async with serving(keys=(KEY,)) as (_, url), client_of(url, headers={"x-api-key": KEY}) as client:
        answer = await client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 2, "stream": stream})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
        assert "ValueError" not in answer.text and SECRET not in answer.text
        assert (await client.get("/health")).status_code == 200
    text = shown(caplog)
    assert text.count("ERROR") == 1 and text.startswith("ERROR tandem.serve: POST /v1/completions failed\nTraceback")
    assert text.count("in broken") == 2 and "KeyError\n\nwhich led to\n\nTraceback" in text and "reply.py" in text
    assert text.endswith("ValueError") and SECRET not in text and KEY not in text


async def test_a_route_that_fails_is_told_with_its_path(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (service, url), client_of(url) as client:
        monkeypatch.setattr(type(service), "statistics", broken)
        assert (await client.get("/load")).status_code == 500
        monkeypatch.undo()
    assert shown(caplog).startswith("ERROR tandem.serve: GET /load failed\n") and len(caplog.records) == 1


async def test_a_failure_tells_that_it_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that keeps it loses its next request, as the server closes it then."""
    async with serving() as (service, url), client_of(url) as client:
        monkeypatch.setattr(type(service), "statistics", broken)
        for _ in range(30):
            answer = await client.get("/load")
            assert answer.status_code == 500 and answer.headers.get_list("connection") == ["close"]
        monkeypatch.undo()
        assert (await client.get("/load")).status_code == 200


def test_a_failure_is_told_to_pages_of_the_origins_that_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered outside of what adds the header; without it a browser shows its page no status and no error."""
    origin = "https://a.example"
    with serve_drive.serving(ServeOptions(cors_origin=[origin])) as served:
        monkeypatch.setattr(type(served.service), "statistics", broken)
        for asked, allowed in ((origin, origin), ("https://evil.example", None), (None, None)):
            answer = served.http.get("/load", headers={"origin": asked} if asked else {})
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.headers.get_list("connection") == ["close"]
        monkeypatch.undo()
    with serve_drive.serving() as served:
        monkeypatch.setattr(type(served.service), "statistics", broken)
        answer = served.http.get("/load", headers={"origin": origin})
        assert answer.status_code == 500 and "access-control-allow-origin" not in answer.headers
        monkeypatch.undo()


def test_what_is_a_clients_mistake_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    for error in (RequestError("no", code="invalid_value"), httpx.ReadError("x"), OSError(28, "No space left", SECRET)):
        report(error, "GET", "/")
        report(error, "GET", "/")
    report(RequestError(SECRET, code="internal_error"), "GET", "/x")
    report(TandemError("lost"), "GET", "/y")
    told = [record.getMessage().splitlines() for record in caplog.records]
    assert [lines[0] for lines in told] == [
        "GET / failed",
        "GET / failed",
        "GET /x failed: internal_error",
        "GET /y failed",
    ]
    assert told[1][-1] == "OSError: No space left" and len(told[2]) == 1 and caplog.records[0].levelno == logging.ERROR


def test_a_long_chain_is_cut() -> None:
    def fall(depth: int) -> None:
        try:
            if depth:
                fall(depth - 1)
            raise ValueError(SECRET)
        except ValueError:
            raise KeyError(SECRET) from None if depth % 20 else ValueError(SECRET)

    with pytest.raises(KeyError) as caught:
        fall(900)
    assert len(trace_of(caught.value)) < 40_000 and SECRET not in trace_of(caught.value)


def test_a_failure_of_one_line_of_a_batch_is_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    source.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(reply.Reply, "envelope", broken)
    assert main(["batch", str(source), "-o", str(target), "--device", "null"]) == 0
    [answer] = [json.loads(raw) for raw in target.read_text().splitlines()]
    assert answer["response"]["status_code"] == 500
    assert shown(caplog).count("POST /v1/completions failed\nTraceback") == 1
