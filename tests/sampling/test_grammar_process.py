"""The processes that compile and follow grammars: limits, turns, losses."""

import os
import queue
import re
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
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
    is_alive,
)

from tandem.errors import GrammarError, RequestError
from tandem.request import Constraint
from tandem.sampling import grammar, grammar_process
from tandem.sampling.grammar import GrammarLimits, GrammarMask, compile_later
from tandem.sampling.grammar_worker import Worker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


BURN = """
from tandem.sampling.grammar_follow import Follower
def burn(do):
    def compile(tokenizer, num_logits, kind, text, limits):
        import time
        end_s = time.process_time() + float(text.split()[1]) if text.startswith("burn") else 0.0
        while time.process_time() < end_s:
            pass
        if text.startswith("sleep"):
            time.sleep(60)
        return do(tokenizer, num_logits, kind, text, limits)
    return compile
Follower.compile = burn(Follower.compile)
"""


@pytest.fixture
def begin(monkeypatch):
    """Compiling "burn S …" takes S s of processor time more, "sleep" a minute of none. (text, limits) → future."""
    monkeypatch.setattr(grammar_process, "BOOTSTRAP", BURN + grammar_process.BOOTSTRAP)
    grammar.close()

    def start(text: str, **limits) -> Future[GrammarMask]:
        return compile_later(Constraint("regex", text), TOKENIZER_JSON, NUM_LOGITS, [EOS], GrammarLimits(**limits))

    assert start("started").result(10)
    yield start
    grammar.close()


def children() -> set[int]:
    [parent] = (process.pid for process in grammar.processes() if process.name == "try")
    return {int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()}


def test_c26_compile_time_is_bounded(begin):
    """What takes too long is ended, and whoever compiles beside it or behind it is none the wiser."""
    burning = begin("burn 60", compile_s=0.7)
    time.sleep(0.2)
    assert accepts(begin("beside").result(10), "beside")
    assert not burning.done() and len(children()) >= 2
    for _ in range(6):  # on a busy machine its time may be over before it has had so much of a processor
        told = str(burning.exception(20))
        if "could not be compiled in time" not in told:
            break
        burning = begin("burn 60", compile_s=0.7)
    assert re.search(r"longer than 0\.7 s of processor time.*\n.*simpler", told)
    assert accepts(begin("behind").result(10), "behind")
    began_s = time.perf_counter()
    with pytest.raises(RequestError, match=r"longer than 0\.7 s"):  # a refusal is remembered
        begin("burn 60", compile_s=0.7).result(10)
    assert time.perf_counter() - began_s < 0.3


def test_c26_what_hangs_without_using_the_processor_is_ended(begin):
    with pytest.raises(RequestError, match="not be compiled in time") as caught:
        begin("sleep", compile_s=0.05).result(20)
    assert caught.value.code == "overloaded"
    assert accepts(begin("behind").result(10), "behind")


def test_what_nobody_waits_for_is_compiled_no_longer(begin):
    """Those in line and those at work, unless somebody else waits for the same grammar."""
    started = [begin(f"burn 60 {number % 6}") for number in range(12)]
    time.sleep(0.3)
    assert grammar.statistics()["trials"] == 12
    burning = max(children())
    assert all(future.cancel() for future in started[:11])
    for future in started[:11]:
        with pytest.raises(CancelledError):
            future.result(0)
    assert grammar.statistics()["trials"] == 1
    time.sleep(0.3)
    assert children(), "it goes on for the one who is left"
    started[11].cancel()
    deadline_s = time.perf_counter() + 2
    while any(is_busy(pid) for pid in children()) or is_alive(str(burning)):
        assert time.perf_counter() < deadline_s
        time.sleep(0.01)
    assert grammar.statistics()["trials"] == 0
    assert accepts(begin("cheap").result(2), "cheap")


def test_a_cheap_grammar_waits_for_first_slices_only(begin):
    """48 that take long, for ever: whoever is refused is followed by another one."""
    numbers, stop = iter(range(10**6)), threading.Event()

    def attack(_: object = None) -> None:
        if not stop.is_set():
            begin(f"burn 60 {next(numbers)}").add_done_callback(lambda _: threads.submit(attack))

    with ThreadPoolExecutor(4) as threads:
        for _ in range(48):
            attack()
        time.sleep(0.5)
        took_s = []
        for number in range(4):
            began_s = time.perf_counter()
            assert accepts(begin(f"cheap {number}").result(20), f"cheap {number}")
            took_s.append(time.perf_counter() - began_s)
        known_s = time.perf_counter()
        assert accepts(begin("cheap 0").result(5), "cheap 0")
        known_s = time.perf_counter() - known_s
        stop.set()
        grammar.close()
    assert min(took_s) < 2, f"48 slices of 15 ms, and a few ms for each child: {took_s}"
    assert known_s < 1, "a grammar that is known stands in no line"


def test_lines_are_bounded_and_say_so(begin):
    """Beyond the first line's limit a request is refused at once; so is one beyond those that take long."""
    started = [begin(f"burn 60 {number}", max_line=4) for number in range(12)]
    wait(started[5:], 2)
    refused = [future for future in started if future.done()]
    assert len(refused) >= 12 - 1 - 3 - 2, "one at work, three of four in line, and what was quicker than this test"
    assert {future.exception().code for future in refused} == {"overloaded"}
    assert "3 new grammars are in line before this one; the limit is 3" in str(refused[0].exception())
    assert "\nhint: try again" in str(refused[0].exception())
    for future in started:
        future.cancel()
    started = [begin(f"burn 61 {number}") for number in range(80)]
    heavy = "grammars that take long to compile are in line before this one; the limit is"
    deadline_s = time.perf_counter() + 20
    while not any(future.done() for future in started):
        assert time.perf_counter() < deadline_s
        time.sleep(0.05)
    [late] = [future for future in started if future.done()][:1]
    assert heavy in str(late.exception())
    for future in started:
        future.cancel()


def test_what_is_in_line_holds_no_thread(begin):
    before = threading.active_count()
    started = [begin(f"burn 60 {number}") for number in range(100)]
    assert threading.active_count() == before
    for future in started:
        future.cancel()


def test_what_takes_long_to_compile_is_behind_nobody_cheap(begin):
    """It fits, so it is compiled a second time where it is followed: on a thread of its own kind."""
    started = [begin(f"burn 0.3 {number}") for number in range(3)]
    time.sleep(0.5)
    assert accepts(begin("cheap").result(10), "cheap")
    assert not all(future.done() for future in started), "this test came too late"
    for number, future in enumerate(started):
        assert accepts(future.result(30), f"burn 0.3 {number}")


def test_the_processes_step_back(begin):
    """Behind the arithmetic; what takes long, further."""
    burning = begin("burn 60")
    time.sleep(1.0)
    parents = [process.pid for process in grammar.processes()]
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in parents} == {os.getpriority(os.PRIO_PROCESS, 0) + 5}
    assert os.getpriority(os.PRIO_PROCESS, max(children())) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 19)
    burning.cancel()


def test_what_is_forgotten_before_it_is_compiled_leaves_nothing():
    ours, theirs = Pipe()
    with ours, theirs:
        worker = Worker(theirs)
        worker._on_tokenizer(0, 0, TOKENIZER_JSON, NUM_LOGITS, (EOS,))
        worker._compile = [queue.SimpleQueue()]  # nobody works at it
        for number in (1, 2):
            worker._on_follow(number, 0, "regex", "a+", GrammarLimits(), 0)
        worker._on_forget(1)
        worker._compile[0].get()()
        worker._compile[0].get()()
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
    grammar._process("follow").kill()
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
    process, number = grammar._process("follow"), mask.number
    assert number in process._places
    del mask
    assert number not in process._places


def is_busy(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "R"
    except OSError:
        return False
