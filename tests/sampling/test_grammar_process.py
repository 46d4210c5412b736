"""The processes that compile and follow grammars: limits, turns, losses, ends."""

import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest
from grammar_drive import (
    EOS,
    NUM_LOGITS,
    TOKENIZER,
    TOKENIZER_JSON,
    accepts,
    compiled,
)

from tandem.errors import GrammarError, RequestError
from tandem.request import Constraint
from tandem.sampling import grammar, grammar_process
from tandem.sampling.grammar import GrammarLimits, compile_constraint
from tandem.sampling.grammar_worker import Worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_c26_compile_time_is_bounded(monkeypatch):
    """What hangs in compiling is ended, and whoever compiles beside it or behind it is none the wiser."""
    hang = "from tandem.sampling.grammar_follow import Follower; import time; do = Follower.compile; "
    hang += "Follower.compile = lambda *what: time.sleep(60) if what[3] == 'hang' else do(*what); "
    monkeypatch.setattr(grammar_process, "BOOTSTRAP", hang + grammar_process.BOOTSTRAP)
    grammar.close()
    try:
        with ThreadPoolExecutor(2) as threads:
            hanging = threads.submit(compiled, "regex", "hang", compile_s=0.5)
            time.sleep(0.2)
            [first] = (process for process in grammar.processes() if process.name == "try")
            assert accepts(compiled("regex", "beside"), "beside")
            with pytest.raises(RequestError, match=r"longer than 0\.5 s"):
                hanging.result(10)
        deadline_s = time.perf_counter() + 2
        while not first.is_lost or Path(f"/proc/{first.pid}").exists():
            assert time.perf_counter() < deadline_s
            time.sleep(0.01)
        assert accepts(compiled("regex", "behind"), "behind")
    finally:
        grammar.close()


@pytest.fixture
def hanging(monkeypatch):
    """Compiling a text that begins with "hang" takes a minute. Starts threads: (text, compile_s) → (turn, future)."""
    hang = "from tandem.sampling.grammar_follow import Follower; import time; do = Follower.compile; "
    hang += "Follower.compile = lambda *what: time.sleep(60) if what[3].startswith('hang') else do(*what); "
    monkeypatch.setattr(grammar_process, "BOOTSTRAP", hang + grammar_process.BOOTSTRAP)
    grammar.close()
    threads = ThreadPoolExecutor(32)

    def start(text: str, compile_s: float = 20.0):
        turn, constraint = grammar.Turn(), Constraint("regex", text)
        limits = GrammarLimits(compile_s=compile_s)
        what = constraint, TOKENIZER_JSON, NUM_LOGITS, [EOS], limits, turn
        return turn, threads.submit(compile_constraint, *what)

    yield start
    grammar.close()
    threads.shutdown()


def test_what_nobody_waits_for_is_compiled_no_longer(hanging):
    """Those in line and those at work, unless somebody else waits for the same grammar."""
    started = [hanging(f"hang{number % 6}") for number in range(12)]
    time.sleep(1.2)  # one is in the slow lane by now
    assert grammar.statistics()["trials"] == 6
    for turn, _ in started[:6]:
        turn.leave()
    for _, future in started[:6]:
        assert isinstance(future.exception(1), RequestError)
    assert grammar.statistics()["trials"] == 6
    for turn, _ in started[6:]:
        turn.leave()
    deadline_s = time.perf_counter() + 2
    while grammar.statistics()["trials"]:
        assert time.perf_counter() < deadline_s
        time.sleep(0.01)
    began_s = time.perf_counter()
    assert accepts(compiled("regex", "cheap"), "cheap")
    assert time.perf_counter() - began_s < 2


def test_a_cheap_grammar_does_not_wait_behind_those_that_take_long(hanging):
    started = [hanging(f"hang{number}") for number in range(16)]
    time.sleep(0.3)
    began_s = time.perf_counter()
    assert accepts(compiled("regex", "cheap"), "cheap")
    assert time.perf_counter() - began_s < 3, "16 in line, half a second each at least, and more for each process"
    deadline_s = time.perf_counter() + 10
    while not any(future.done() for _, future in started):  # the slow lane's line has an end
        assert time.perf_counter() < deadline_s
        time.sleep(0.01)
    [error] = {str(future.exception()) for _, future in started if future.done()}
    assert "in line before this one" in error
    for turn, _ in started:
        turn.leave()


def test_a_refusal_is_remembered(hanging):
    for _ in range(2):
        began_s = time.perf_counter()
        _, future = hanging("hang", compile_s=1.0)
        with pytest.raises(RequestError, match="takes longer than 1 s"):
            future.result(10)
        took_s = time.perf_counter() - began_s
    assert took_s < 0.2


def test_a_first_mask_that_does_not_come_is_no_lost_process(monkeypatch):
    deaf = "from tandem.sampling.grammar_worker import Worker; Worker._on_follow = lambda *what: None; "
    monkeypatch.setattr(grammar_process, "BOOTSTRAP", deaf + grammar_process.BOOTSTRAP)
    grammar.close()
    try:
        with pytest.raises(RequestError, match=r"not there within 0\.5 s") as caught:
            compiled("regex", "a", compile_s=0.5)
        assert caught.value.code == "overloaded"
        assert not any(process.is_lost for process in grammar.processes())
    finally:
        grammar.close()


def test_what_is_forgotten_before_it_is_compiled_leaves_nothing():
    ours, theirs = Pipe()
    with ours, theirs:
        worker = Worker(theirs)
        worker._on_tokenizer(0, 0, TOKENIZER_JSON, NUM_LOGITS, (EOS,))
        worker._compile = queue.SimpleQueue()  # nobody works at it
        for number in (1, 2):
            worker._on_follow(number, 0, "regex", "a+", GrammarLimits(), False)
        worker._on_forget(1)
        worker._compile.get()()
        worker._compile.get()()
        assert set(worker._requests) == {2}
        assert [ours.recv()[0], ours.recv()[0]] == [0, 2] and not ours.poll(), "an answer for nobody"
        worker._on_forget(2)
        assert not worker._requests


def test_c26_compiling_that_takes_too_much_memory_is_refused_and_its_neighbour_is_not():
    grammar.close()
    try:
        with ThreadPoolExecutor(2) as threads:
            greedy = threads.submit(compiled, "regex", r"(\p{L}|\p{Han})*" * 4000, compile_bytes=400 << 20)
            time.sleep(0.3)
            assert accepts(compiled("regex", "beside", compile_bytes=400 << 20), "beside")
            with pytest.raises(RequestError, match="more memory than 400 MiB"):
                greedy.result(30)
        assert accepts(compiled("regex", "behind it"), "behind it")
    finally:
        grammar.close()


def test_a_lost_process_ends_its_requests_and_the_next_one_starts_another():
    mask = compiled("regex", "[0-9]+")
    grammar._follow.kill()
    mask.accept(TOKENIZER.encode("7").ids)
    with pytest.raises(RequestError, match="lost") as caught:
        mask.allowed()
    assert caught.value.code == "internal_error"
    assert accepts(compiled("regex", "[0-9]+"), "77")


def test_masks_have_a_budget_of_processor_time():
    """Each limit is named; whoever stays inside goes on."""
    with pytest.raises(GrammarError, match=r"a mask took .* the limit is 1e-06 s of processor time"):
        accepts(compiled("regex", "[0-9]+", step_s=1e-6), "1234")
    with pytest.raises(GrammarError, match=r"tokens; the limit is 1e-06 s and 0.001 ms a token"):
        accepts(compiled("regex", "[0-9]+", burst_s=1e-6, mean_s=1e-6), "1234")
    assert accepts(compiled("regex", "[0-9]+", burst_s=1e-6), "1234" * 50)


def test_a_grammar_that_is_done_with_is_forgotten():
    mask = compiled("regex", "[0-9]+")
    process, number = grammar._follow, mask._number
    assert number in process._places
    del mask
    assert number not in process._places


def test_nothing_outlives_its_parent():
    """The processes end with whoever started them, even if he is killed."""
    code = f"""
import os, signal
from tandem.request import Constraint
from tandem.sampling import grammar
grammar.compile_constraint(Constraint("regex", "a+"), {TOKENIZER_JSON!r}, {NUM_LOGITS}, [{EOS}])
print(*(process.pid for process in grammar.processes()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline_s = time.perf_counter() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.perf_counter() < deadline_s, "an orphan"
        time.sleep(0.01)


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
