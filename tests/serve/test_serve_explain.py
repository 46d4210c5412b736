"""The command ``tandem explain`` against a running server: the table adds up, errors teach."""

import json
import re

import pytest
from serve_drive import Served, serving

from tandem.cli import main


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)


def test_the_table_adds_up_to_the_end_to_end_time(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(step_s=0.01, max_model_len=256) as served:
        name = served.complete(n=2, max_tokens=8, ignore_eos=True)["id"]
        assert main(["explain", name, "--url", f"{served.url}/v1/"]) == 0
        text = capsys.readouterr().out
        assert main(["explain", name, "--url", served.url, "--json"]) == 0
        account = json.loads(capsys.readouterr().out)
    rows = dict(re.findall(r"^(\w+) +([\d.]+) ms", text, re.MULTILINE))
    parts = {part: float(rows[part]) for part in account["parts_s"]}
    assert set(rows) == {*account["parts_s"], "sum", "total"} and parts["decode"] > 40
    assert sum(parts.values()) == pytest.approx(float(rows["sum"]), abs=0.02)
    assert float(rows["sum"]) == pytest.approx(float(rows["total"]), rel=0.01)
    shares = [float(share) for share in re.findall(r"([\d.]+)%", text)]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.6) and shares[-1] == pytest.approx(100, abs=1)
    assert name in text and "prompt 0, answer 1: 8 tokens, finish length" in text and "7 decode steps" in text


def test_errors_teach(null: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str, status: int = 1) -> str:
        assert main(["explain", *words]) == status
        return capsys.readouterr().err

    unknown = told("cmpl-x\x1b[2J", "--url", null.url)
    assert "is unknown here" in unknown and "x-request-id" in unknown and "\x1b" not in unknown
    assert "no server answers" in told("x", "--url", "http://127.0.0.1:9") and "tandem serve" in told(
        "x", "--url", "http://127.0.0.1:9"
    )
    assert "http://127.0.0.1:8000" in told("x", "--url", "localhost:8000", status=2)
    assert "no tandem server" in told("x", "--url", f"{null.url}/page")
    assert "key" in told("x", "--api-key", "ö", "--url", null.url, status=2)


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(keys=("s3cret",), max_model_len=128) as served:
        name = served.complete(max_tokens=1)["id"]
        assert main(["explain", name, "--url", served.url]) == 1
        assert "--api-key" in capsys.readouterr().err
        assert main(["explain", name, "--url", served.url, "--api-key", "s3cret"]) == 0
        monkeypatch.setenv("TANDEM_API_KEY", "s3cret,other")
        assert main(["explain", name, "--url", served.url]) == 0
        assert "s3cret" not in "".join(capsys.readouterr())
