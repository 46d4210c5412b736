"""The processes that compile and follow grammars, when they are stopped, slow, or left by whoever started them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from grammar_drive import EOS, NUM_LOGITS, TOKENIZER, TOKENIZER_JSON, accepts, compiled, is_alive

from tandem.errors import RequestError
from tandem.request import Constraint
from tandem.sampling import grammar, grammar_process
from tandem.sampling.grammar import GrammarMask, compile_later

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def hurried(monkeypatch):
    """It is looked every 50 ms whether the processes answer, so half a second without one is too long."""
    grammar.close()
    monkeypatch.setattr(grammar_process, "LOOK_S", 0.05)
    yield
    grammar.close()


@pytest.mark.usefixtures("hurried")
def test_a_follower_that_is_stopped_is_ended_with_its_requests_and_another_is_started():
    mask = compiled("regex", "[0-9]+")
    stopped = grammar._process("follow")
    os.kill(stopped.pid, signal.SIGSTOP)
    mask.accept(TOKENIZER.encode("7").ids)
    waiting = later("[a-c]+")
    assert mask.allowed() is None, "half a second is not over"
    error = waiting.exception(5)
    assert isinstance(error, RequestError) and error.code == "overloaded" and "did not answer for" in str(error)
    with pytest.raises(RequestError, match="follows grammars did not answer for") as caught:
        mask.allowed()
    assert caught.value.code == "overloaded" and not is_alive(str(stopped.pid))
    assert accepts(compiled("regex", "[0-9]+"), "77")


@pytest.mark.usefixtures("hurried")
def test_a_process_that_tries_grammars_and_is_stopped_is_ended_and_another_is_started():
    mask = compiled("regex", "[0-9]+")
    os.kill(grammar._process("try").pid, signal.SIGSTOP)
    error = later("[a-c]+").exception(5)
    assert isinstance(error, RequestError) and error.code == "overloaded"
    assert "compiles grammars did not answer for" in str(error)
    assert accepts(mask, "7"), "who follows is none the wiser"
    assert accepts(compiled("regex", "[a-c]+"), "ab")


LATE = """
import time
from tandem.sampling.grammar_worker import Worker
def late(do):
    def ping(self, number, value):
        end_s = time.process_time() + 1.0
        while time.process_time() < end_s:
            time.sleep(0.001)
            sum(range(20_000))
        do(self, number, value)
    return ping
Worker._on_ping = late(Worker._on_ping)
"""


@pytest.mark.usefixtures("hurried")
def test_a_process_that_is_slow_to_answer_but_works_is_left_alone(monkeypatch):
    """As one that gets little of a busy machine's time: an answer takes a second of it, twice what a silent one has."""
    monkeypatch.setattr(grammar_process, "BOOTSTRAP", LATE + grammar_process.BOOTSTRAP)
    mask, process = compiled("regex", "[0-9]+"), grammar._process("follow")
    began_s = time.perf_counter()
    while process._num_answered < 2:
        assert not process.is_lost and time.perf_counter() < began_s + 30
        time.sleep(0.05)
    assert time.perf_counter() - began_s > 1.5
    assert accepts(mask, "7")
    monkeypatch.setattr(grammar_process, "MAX_SILENT_CPU_S", 0.5)
    while not process.is_lost:
        assert time.perf_counter() < began_s + 60, "an answer took longer than it may"
        time.sleep(0.05)
    assert process.is_stuck


@pytest.mark.usefixtures("hurried")
def test_time_in_which_nobody_looked_does_not_count(monkeypatch):
    """The engine was stopped together with its processes, and goes on a moment before them."""
    mask, process = compiled("regex", "[0-9]+"), grammar._process("follow")
    monkeypatch.setattr(grammar_process, "_cpu_s", lambda pid: time.sleep(0.7) or 0.0)  # the watcher is kept, too
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGCONT)
    assert accepts(mask, "7") and not process.is_lost


def later(pattern: str) -> Future[GrammarMask]:
    return compile_later(Constraint("regex", pattern), TOKENIZER_JSON, NUM_LOGITS, [EOS])


def test_grammars_outlive_the_thread_that_was_the_first_to_want_one():
    """The kernel ends a process with the thread that started it; so it must be none that comes and goes."""
    grammar.close()
    with ThreadPoolExecutor(1) as thread:
        mask = thread.submit(compiled, "regex", "[0-9]+").result(10)
    before = {process.name: process.pid for process in grammar.processes()}
    time.sleep(0.2)
    assert accepts(mask, "7") and accepts(compiled("regex", "[a-c]+"), "ab")
    assert {process.name: process.pid for process in grammar.processes()} == before


@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_outlives_its_parent(is_stopped: bool):
    """The processes end with whoever started them, even if he is killed and they are stopped."""
    code = f"""
import sys
from pathlib import Path
from tandem.request import Constraint
from tandem.sampling import grammar
grammar.compile_constraint(Constraint("regex", "a+"), {TOKENIZER_JSON!r}, {NUM_LOGITS}, [{EOS}])
pids = {{process.name: process.pid for process in grammar.processes()}}
forked = Path("/proc/%d/task/%d/children" % (pids["try"], pids["try"])).read_text().split()
print(*pids.values(), *forked, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = parent.stdout.readline().split()
        if is_stopped:
            for pid in pids:
                os.kill(int(pid), signal.SIGSTOP)
        parent.kill()
    assert len(pids) >= 3
    deadline_s = time.perf_counter() + 2
    try:
        while any(is_alive(pid) for pid in pids):
            assert time.perf_counter() < deadline_s, "an orphan"
            time.sleep(0.01)
    finally:
        for pid in filter(is_alive, pids):
            os.kill(int(pid), signal.SIGKILL)
