"""The process border: mail and news through it, start-up errors, and what each side does when the other dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from engine_fakes import made_up
from test_loop import Collector, ask

from tandem.engine import wire
from tandem.engine.contract import Abort, Add, Call, Card, Close
from tandem.engine.process import ProcessHost
from tandem.errors import (
    CapacityError,
    EngineDeadError,
    ModelError,
    RequestError,
    TandemError,
)
from tandem.plan import Changes
from tandem.request import Change, Constraint, Request, SamplingParams, TokenLogprobs

MAKE = "engine_fakes:make_fake_loop"


class Waiting(Collector):
    """A collector that another thread can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def news(self, changes) -> None:
        with self.changed:
            super().news(changes)
            self.changed.notify_all()

    def stopped(self, error) -> None:
        with self.changed:
            super().stopped(error)
            self.changed.notify_all()

    def wait_for(self, predicate, timeout_s: float = 5.0) -> None:
        with self.changed:
            assert self.changed.wait_for(predicate, timeout_s), "it never came"


def start(listener=None, on_phase=None, **settings) -> ProcessHost:
    host = ProcessHost(settings, listener or Waiting(), on_phase, make=MAKE)
    try:
        host.ready.result(20)
    except BaseException:
        host.close()
        raise
    return host


def test_everything_survives_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5, stop=("a", "b"), stop_token_ids=(5,), logit_bias=((3, 1.5),), seed=-(2**63), logprobs=2,
        constraint=Constraint("regex", "a+"),
    )  # fmt: skip
    request = Request("r", range(3), params, frozenset({1}), 2, "salt", "q", 1.5, "c", "b")
    for mail in (Add(request), Abort("r"), Call(3, "reload", "x"), Close()):
        back = wire.decode_mail(wire.encode_mail(mail))
        if isinstance(mail, Add):
            assert back.request.params == params and list(back.request.prompt) == [0, 1, 2]
            assert (back.request.client, back.request.bundle) == ("c", "b")
            assert list(back.request.eos) == [1] and back.request.fork_of == "q" and back.request.salt == "salt"
        else:
            assert back == mail
    logprob = TokenLogprobs(4, -0.5, 1, ((4, -0.5), (5, -1.0)))
    change = Change("r", [4], "stop", [logprob], [TokenLogprobs(1, None, 0, ())], None, 3, None)
    assert list(wire.decode_news(wire.encode(wire.ChangesNews.of([change]))).changes) == [change]
    changes = wire.decode_news(wire.encode(wire.ChangesNews.of(Changes(["a", "b"], [7, 0], [change])))).changes
    assert (changes.requests, changes.tokens, changes.others) == (["a", "b"], [7, 0], [change])
    assert list(changes) == [Change("a", (7,)), Change("b", (0,)), change]
    for error in (RequestError("no", param="n", code="c", hint="h"), CapacityError("big"), ModelError("m", hint="h")):
        back = wire.error_of(wire.decode_news(wire.encode(wire.StoppedNews(wire.fault_of(error)))).fault)
        assert type(back) is type(error) and str(back) == str(error)
        assert back.hint == error.hint and getattr(back, "code", None) == getattr(error, "code", None)


def test_a_thousand_requests_cross_and_come_back() -> None:
    listener, phases = Waiting(), []
    host = start(listener, phases.append)
    try:
        assert isinstance(host.ready.result(0), Card) and phases == ["pretending to load"]
        for number in range(1000):
            host.send(ask(f"r{number}", [3 + number % 200, number % 7], 1 + number % 9))
            if number % 10 == 3:
                host.send(Abort(f"r{number}"))
        listener.wait_for(lambda: len(listener.finish) == 1000, 20.0)
        for number in range(1000):
            name, prompt = f"r{number}", [3 + number % 200, number % 7]
            expected = [made_up(prompt, i) for i in range(1 + number % 9)]
            if listener.finish[name] == "length":
                assert listener.tokens[name] == expected
            else:
                assert listener.finish[name] == "abort" and number % 10 == 3
                assert listener.tokens.get(name, []) == expected[: len(listener.tokens.get(name, []))]
        assert max(listener.batches) > 1
        deadline_s = time.perf_counter() + 3
        while host.statistics.get("finished") != 1000:
            assert time.perf_counter() < deadline_s
            time.sleep(0.02)
        assert host.statistics["live"] == 0
    finally:
        host.close()
    assert listener.ended == [None]
    with pytest.raises(EngineDeadError):
        host.send(Abort("r1"))


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    host = start()
    assert not list(tmp_path.iterdir()), "the sockets' folder must be gone once both sides are connected"
    pid = host.pid
    host.close()
    assert not psutil.pid_exists(pid)
    assert not [t for t in threading.enumerate() if t.name == "tandem-news"]


@pytest.mark.parametrize(
    ("kind", "expected", "hint"), [("error", ModelError, "look elsewhere."), ("defect", TandemError, None)]
)
def test_start_up_errors_cross_as_they_are(kind: str, expected: type, hint: str | None) -> None:
    before = psutil.Process().children()
    with pytest.raises(expected) as caught:
        start(start=kind)
    assert caught.value.hint == hint
    assert not [p for p in psutil.Process().children() if p not in before and p.status() != psutil.STATUS_ZOMBIE]


def test_killed_child_is_noticed_within_two_seconds() -> None:
    listener = Waiting()
    host = start(listener, step_s=0.01)
    host.send(ask("a", [5], 4000))
    listener.wait_for(lambda: "a" in listener.tokens)
    call = None
    os.kill(host.pid, signal.SIGKILL)
    began_s = time.perf_counter()
    listener.wait_for(lambda: listener.ended, 2.0)
    assert time.perf_counter() - began_s < 2.0
    assert isinstance(host.error, EngineDeadError) and "signal 9" in str(host.error)
    with pytest.raises(EngineDeadError):
        host.send(ask("b", [5]))
    call = host.call("weights")
    with pytest.raises(EngineDeadError):
        call.result(1.0)
    host.close()


def test_a_step_that_raises_ends_the_child_with_a_reason() -> None:
    listener = Waiting()
    host = start(listener, fail_at_step=3)
    host.send(ask("a", [5], 50))
    listener.wait_for(lambda: listener.ended)
    assert listener.errors["a"][1] == "engine_dead" and "the device is gone" in str(host.error)
    assert len(listener.tokens["a"]) == 2
    process = host._process
    host.close()
    assert process.returncode == 1


def test_a_step_that_hangs_shows_and_can_be_closed() -> None:
    listener = Waiting()
    host = start(listener, hang_at_step=2)
    host.send(ask("a", [5], 50))
    listener.wait_for(lambda: "a" in listener.tokens)
    time.sleep(0.2)  # the report behind the first step
    heard_s = host.heard_s
    time.sleep(0.6)
    assert host.heard_s == heard_s, "no sign of progress may come from a hung step"
    began_s = time.perf_counter()
    host.close(timeout_s=0.3)
    assert time.perf_counter() - began_s < 3 and not psutil.pid_exists(host.pid)


def test_a_child_that_cannot_even_begin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.process.BOOTSTRAP", "raise SystemExit(3)")
    began_s = time.perf_counter()
    with pytest.raises(EngineDeadError, match="status 3"):
        start()
    assert time.perf_counter() - began_s < 3


def test_mail_to_a_dead_child_is_an_engine_that_died() -> None:
    """Between the child's death and its discovery, sending must neither block nor fail in its own way."""
    host = start()
    os.kill(host.pid, signal.SIGKILL)
    try:
        for _ in range(2000):
            host.send(ask("a", [5]))
            time.sleep(0.0005)
    except EngineDeadError:
        pass
    assert isinstance(host.error, EngineDeadError)
    host.close()


def test_calls_cross() -> None:
    host = start()
    try:
        assert host.call("weights").result(2) == "first"
        with pytest.raises(ModelError):
            host.call("reload", "bad").result(2)
        assert host.call("weights").result(2) == "first"
        host.call("reload", "second").result(2)
        assert host.call("weights").result(2) == "second"
        with pytest.raises(TandemError):
            host.call("nonsense").result(2)
    finally:
        host.close()


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from engine_fakes import made_up
from test_loop import Collector, ask
from tandem.engine.process import ProcessHost
host = ProcessHost({{"step_s": 0.01, **{settings!r}}}, Collector(), make="engine_fakes:make_fake_loop")
host.ready.result()
host.send(ask("a", [5], 4000))
print(host.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "settings"), [(signal.SIGKILL, {}), (signal.SIGKILL, {"hang_at_step": 2})])
def test_no_child_survives_its_parent(number: int, settings: dict) -> None:
    """The script has no ``if __name__ == "__main__"`` guard and comes from -c: the child never runs it again."""
    code = PARENT.format(path=[str(Path(__file__).parent)], settings=settings)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        parent.send_signal(number)
        parent.wait(5)
        deadline_s = time.perf_counter() + 2
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.perf_counter() < deadline_s, "an orphan survives"
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_the_child_leaves_signals_to_its_parent() -> None:
    listener = Waiting()
    host = start(listener, step_s=0.001)
    try:
        host.send(ask("a", [5], 300))
        listener.wait_for(lambda: "a" in listener.tokens)
        os.kill(host.pid, signal.SIGINT)
        os.kill(host.pid, signal.SIGTERM)
        listener.wait_for(lambda: listener.finish.get("a") == "length")
    finally:
        host.close()


def test_a_slow_listener_does_not_hold_the_loop() -> None:
    """The reader sleeps on the first news; meanwhile the loop goes on, as its report tells."""

    class Slow(Waiting):
        def news(self, changes) -> None:
            if not self.batches:
                time.sleep(1.0)
            super().news(changes)

    listener = Slow()
    host = start(listener, step_s=0.001)
    try:
        began_s = time.perf_counter()
        host.send(ask("a", [5], 200))
        listener.wait_for(lambda: listener.finish.get("a") == "length")
        took_s = time.perf_counter() - began_s
        assert took_s < 1.4, "200 steps of 1 ms were held up by a reader that slept"
        assert listener.tokens["a"] == [made_up([5], i) for i in range(200)]
    finally:
        host.close()
