"""Grammars: masks that keep an answer inside, refusals that come before anything is scheduled."""

import json
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.errors import GrammarError, RequestError
from tandem.plan import Arrival
from tandem.request import Constraint, SamplingParams
from tandem.sampling import grammar, grammar_process
from tandem.sampling.grammar import GrammarLimits, GrammarMask, compile_constraint
from tandem.sampling.grammar_worker import Worker
from tandem.sampling.rows import SamplerRows
from tandem.sampling.sample import sample

EOS = 256
NUM_LOGITS = 300  # 257 tokens and padding


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


TOKENIZER = byte_tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left():
    grammar.hold()
    yield
    grammar.release()
    assert not grammar.processes() or grammar._users


def compiled(kind: str, text: str, **limits) -> GrammarMask:
    return compile_constraint(
        Constraint(kind, text), TOKENIZER_JSON, NUM_LOGITS, [EOS], GrammarLimits(**limits) if limits else None
    )


def wait(mask: GrammarMask) -> bytes:
    deadline_s = time.perf_counter() + 10
    while (bits := mask.allowed()) is None:
        assert time.perf_counter() < deadline_s
        time.sleep(0.001)
    return bits


def allowed_ids(mask: GrammarMask) -> set[int]:
    bits = wait(mask)
    assert len(bits) == 4 * ((NUM_LOGITS + 31) // 32)
    return {i for i in range(8 * len(bits)) if bits[i >> 3] >> (i & 7) & 1}


def accepts(mask: GrammarMask, text: str) -> bool:
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        if token not in allowed_ids(mask):
            return False
        mask.accept([token])
    return EOS in allowed_ids(mask)


SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "ü"]}},
    "required": ["a", "b"], "additionalProperties": False,
})  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("json_schema", SCHEMA, '{"a": 12, "b": "ü"}', '{"a": "12"}'),
        ("json_schema", '{"type":"integer","maximum":20000000000}', "19999999999", "20000000001"),
        ("regex", "[0-9]{2,3}", "123", "1"),
        ("choice", '["yes", "no", "a\\"b\\n"]', 'a"b\n', "maybe"),
        ("grammar", 'start: "a" start "b" | "c"', "aacbb", "aacb"),
    ],
)
def test_masks_keep_the_answer_inside(kind, text, good, bad):
    assert accepts(compiled(kind, text), good)
    assert not accepts(compiled(kind, text), bad)


def test_random_sampling_under_a_schema_gives_its_documents():
    """Ten answers of a model that says anything, drawn under the mask, parse and fit; padding ids never come."""
    params = SamplingParams(temperature=1.0, constraint=Constraint("json_schema", SCHEMA))
    for number in range(10):
        mask, tokens = compiled("json_schema", SCHEMA), []
        rows = SamplerRows(1, NUM_LOGITS, "cpu")
        rows.arrive(Arrival(str(number), 0, [1], 1, params, eos=(EOS,)))
        generator = torch.Generator().manual_seed(number)
        while not tokens or tokens[-1] != EOS:
            logits = torch.randn(1, NUM_LOGITS, generator=generator)
            logits[0, NUM_LOGITS - 10 :] = 50.0
            logits[0, EOS] = 9.0  # whitespace and digits may otherwise go on for long
            logits[0, [t for c in '},"' for t in TOKENIZER.encode(c).ids]] = 5.0
            tokens.append(sample(logits, rows, [0], [1 + len(tokens)], [(0, wait(mask))]).ids_R.item())
            mask.accept(tokens[-1:])
            assert len(tokens) < 400
        document = json.loads(TOKENIZER.decode(tokens))
        assert set(document) == {"a", "b"} and isinstance(document["a"], int) and document["b"] in ("x", "ü")


def deep(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + '{"type":"string"}' + "}}" * levels


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"objekt"}'),
        ("json_schema", '{"$ref":"#"}'),
        ("json_schema", '{"type":"string","pattern":"(["}'),
        ("json_schema", deep(5000)),
        ("json_schema", deep(40)),
        ("json_schema", '{"type":"array","uniqueItems":true}'),
        ("json_schema", '{"type":"integer","minimum":5,"maximum":3}'),
        ("json_schema", "[1"),
        ("json_schema", '"text"'),
        ("regex", "(["),
        ("regex", r"a\bb"),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("choice", "[" * 100_000),
        ("choice", '["\\ud800"]'),
        ("grammar", "start: nowhere"),
        ("grammar", "@@@"),
        ("nonsense", ""),
        ("regex", "a" * 300_000),
    ],
    ids=lambda value: value[:24],
)
def test_c26_bad_grammars_are_refused(kind, text):
    """C26: a RequestError that says why, in bounded time; never a crash, never free text."""
    began_s = time.perf_counter()
    with pytest.raises(RequestError, match="refused") as caught:
        compiled(kind, text)
    assert caught.value.param == "response_format" and len(str(caught.value)) < 600
    assert time.perf_counter() - began_s < 5


LAX = '{"type":"array","items":{"type":"integer"},"uniqueItems":true,"x-guidance":{"lenient":true}}'
ESCAPED = LAX.replace("x-g", "\\u0078-g").replace("{", '{"maximum":' + "1" * 5000 + ",", 1)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", LAX, "x-guidance"),
        ("grammar", f"start: %json {LAX}", "x-guidance"),
        ("grammar", f'start: "a" x\nx: %json\n {LAX}', "x-guidance"),
        ("grammar", f"start: %json {ESCAPED}", "x-guidance"),
        ("grammar", f' {{"grammars": [{{"json_schema": {LAX}}}]}}', "must be a grammar in Lark"),
        ("grammar", f"start: %json {deep(40)}", "nested more than 64"),
        ("grammar", f"start: %json {deep(5000)}", "nested"),
        ("grammar", 'start: r\n  ?r[temperature=5]: "c"', "the attribute temperature"),
        ("grammar", 'start[lazy, capture]: "c"', "the attribute capture"),
        ("grammar", 'start[stop="]:", stop_capture="x"]: /.*/', "the attribute stop_capture"),
    ],
)
def test_what_would_not_be_enforced_is_refused(kind, text, words):
    """A schema cannot ask for laxness, wherever it stands; an attribute of a rule has an effect or is refused."""
    with pytest.raises(RequestError, match=words):
        compiled(kind, text)


def test_attributes_that_have_an_effect_are_taken():
    assert accepts(compiled("grammar", 'start: r "[temperature=5]:"\nr[max_tokens=2]: /a*/'), "aa[temperature=5]:")


def test_a_schema_is_refused_without_the_grammar_around_it():
    with pytest.raises(RequestError) as caught:
        compiled("grammar", 'start: "inner" c\nc: %json {"type": "array", "uniqueItems": true}')
    assert 'failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]' in str(caught.value)
    assert "inner" not in str(caught.value) and "start" not in str(caught.value)


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


def test_c26_recursive_schemas_are_fine():
    assert accepts(compiled("json_schema", '{"type":"object","properties":{"a":{"$ref":"#"}}}'), '{"a":{"a":{}}}')


def test_without_the_library_requests_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="not installed") as caught:
        compiled("regex", "a")
    assert caught.value.hint.startswith('pip install -e ".[serve]"'), "as the docs say"


def test_a_token_outside_the_grammar_fails_the_request():
    mask = compiled("regex", "ab")
    mask.accept(TOKENIZER.encode("b").ids)
    with pytest.raises(RequestError, match="answer left it"):
        wait(mask)


def test_accept_before_the_mask_is_ready_keeps_the_order():
    mask = compiled("regex", "a{50}b")
    token = TOKENIZER.encode("a").ids
    for _ in range(50):
        mask.accept(token)
    assert allowed_ids(mask) == set(TOKENIZER.encode("b").ids)


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
