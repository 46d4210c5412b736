"""Bad input harms its own request only: whatever the type, at every front end and at the process border."""

import array

import numpy as np
import pytest
import torch

from tandem import LLM, AsyncEngine, SamplingParams
from tandem.engine import wire
from tandem.engine.blocking import BlockingEngine
from tandem.engine.contract import Add, Call
from tandem.engine.frontend import token_ids
from tandem.engine.process import ProcessHost
from tandem.errors import RequestError, TandemError
from tandem.request import Request

FAKE = "engine_fakes:make_fake_loop"
THREE = SamplingParams(max_tokens=3, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]
WRONG = [
    ("priority", {"priority": "x"}), ("priority", {"priority": 2**63}), ("priority", {"priority": None}),
    ("salt", {"salt": 5}), ("salt", {"salt": "\ud800"}), ("salt", {"salt": "s" * 1000}),
]  # fmt: skip


@pytest.fixture(scope="module")
def null():
    with LLM(device="null", kv_cache_memory="64MiB", policy="priority") as llm:
        yield llm


def works(llm: LLM) -> None:
    llm._loop.check()
    (result,) = llm.generate("fine", THREE, progress=False)
    assert llm._loop.error is None and len(result.completions[0].token_ids) == 3


@pytest.mark.parametrize(("param", "options"), WRONG)
def test_an_argument_that_is_compared_with_others_never_reaches_them(null: LLM, param: str, options: dict) -> None:
    for call in (lambda: null.generate("a", THREE, progress=False, **options), lambda: null.chat(HI, THREE, **options)):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == param
    works(null)


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_bad_argument_does_not_kill_the_engine(in_process: bool) -> None:
    async with await AsyncEngine.start(make=FAKE, in_process=in_process, options={}) as engine:
        for param, options in WRONG:
            with pytest.raises(RequestError) as caught:
                await engine.submit([5], THREE, **options)
            assert caught.value.param == param
        for prompt, params in ((None, THREE), (b"ab", THREE), ({5}, THREE), ([5], "x"), ([5], {}), (5, THREE)):
            with pytest.raises(RequestError):
                await engine.submit(prompt, params)
        for argument in (5, None, b"x"):
            with pytest.raises(TandemError, match="string"):
                await engine.call("weights", argument)
        good = await engine.submit([5], SamplingParams(max_tokens=3), priority=np.int64(-7), salt="s")
        assert sum([len(update.token_ids) async for update in good]) == 3
        assert engine.error is None and engine.statistics()["open"] == 0


def test_mail_that_cannot_be_read_harms_only_whom_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the checks before the border had a hole: what is sent is no request, no call, no mail at all."""
    with BlockingEngine(make=FAKE, in_process=False, options={"step_s": 0.002}) as engine:
        running = engine.submit([5], SamplingParams(max_tokens=100))
        host, right = engine._host, wire.encode_mail
        assert isinstance(host, ProcessHost)

        def broken(mail):
            if isinstance(mail, Add) and mail.request.prompt[0] == 7:
                object.__setattr__(mail.request.params, "n", 0)  # its own check fails where it is decoded
            elif isinstance(mail, Add) and mail.request.prompt[0] == 8:
                mail.request.arrival_s = "late"  # type: ignore[assignment]
            elif isinstance(mail, Call) and mail.argument == "bad":
                return wire.encode(wire.CallMail(mail.number, mail.name, ["no", "text"]))  # type: ignore[arg-type]
            return right(mail)

        monkeypatch.setattr(wire, "encode_mail", broken)
        for prompt, code in (([7], "invalid_value"), ([8], "internal_error")):
            with pytest.raises(RequestError, match="cannot read") as caught:
                list(engine.submit(prompt, SamplingParams(max_tokens=3)))
            assert caught.value.code == code
        with pytest.raises(TandemError, match="cannot read"):
            engine.call("weights", "bad", timeout_s=5.0)
        for junk in (b"", b"\xc1", b"\x91\x2a", wire.encode([0]), wire.encode({"id": "x"})):
            host._mail.send(junk)
        assert sum(len(update.token_ids) for update in running) == 100
        assert engine.call("weights", timeout_s=5.0) == "first" and engine.error is None


def test_what_cannot_be_sent_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with BlockingEngine(make=FAKE, in_process=False, options={"step_s": 0.002}) as engine:
        right = wire.encode_mail

        def broken(mail):
            if isinstance(mail, Add) and mail.request.id.endswith(".2"):
                raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
            return right(mail)

        monkeypatch.setattr(wire, "encode_mail", broken)
        with pytest.raises(RequestError, match="cannot be sent"):
            engine.submit([5], SamplingParams(max_tokens=4000, n=4))
        assert not engine._front._answers
        engine.call("weights", timeout_s=5.0)
        list(engine.submit([6], SamplingParams(max_tokens=40)))  # long enough for the siblings that were sent to end
        engine.close()
        assert engine._host.statistics["tokens"] < 1000, "siblings ran on, though nobody hears them"


BAD_PROMPTS = [None, 5, 5.5, True, b"ab", bytearray(b"ab"), memoryview(b"ab"), {"prompt": "a"}, {1, 2}, object(),
               [1, None], [1, "a"], [1.5], [[1]], (t for t in [1, 2]), np.array([[1, 2]]), np.array(3), [10**5000],
               np.array([1.5]), torch.tensor([True])]  # fmt: skip


def test_prompts_of_wrong_types_fail_alone(null: LLM) -> None:
    results = null.generate(["Hello", *BAD_PROMPTS, "last"], THREE, progress=False)
    assert [result.error is None for result in results] == [True, *[False] * len(BAD_PROMPTS), True]
    assert all(isinstance(result.error, RequestError) and result.error.param == "prompt" for result in results[1:-1])
    assert all(len(str(result.error)) < 300 for result in results[1:-1])
    works(null)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"Hello", bytearray(b"a"), {"prompt": "a"}, {"a", "b"}, np.array(5)])
def test_a_call_without_prompts_is_one_error(null: LLM, prompts: object) -> None:
    with pytest.raises(RequestError) as caught:
        null.generate(prompts, THREE, progress=False)
    assert caught.value.param == "prompts" and caught.value.hint
    works(null)


def test_arrays_and_iterators_of_any_library_are_prompts(null: LLM) -> None:
    ids = [70, 71, 72]
    expected = null.generate(ids, THREE, progress=False)
    same = [np.array(ids), torch.tensor(ids), array.array("i", ids), tuple(ids), range(70, 73), list(np.array(ids)),
            iter(ids)]  # fmt: skip
    for prompts in same:
        assert null.generate(prompts, THREE, progress=False) == expected
    assert null.generate(same[:-1], THREE, progress=False) == expected * (len(same) - 1)
    assert null.generate(np.array([ids, ids]), THREE, progress=False) == expected * 2
    texts = null.generate((text for text in ("a", "b")), (THREE for _ in range(2)), progress=False)
    assert texts == null.generate(["a", "b"], THREE, progress=False)
    assert [type(token) for token in token_ids([np.int64(3), 4])] == [int, int]


def test_params_of_wrong_types_fail_alone_or_refuse_the_call(null: LLM) -> None:
    results = null.generate(["a", "b", "c"], [THREE, None, "x"], progress=False)
    assert [result.error is None for result in results] == [True, False, False]
    assert {result.error.param for result in results[1:]} == {"params"}
    for params in ("x", 5, {"max_tokens": 3}, [THREE], b"ab"):
        with pytest.raises(RequestError) as caught:
            null.generate(["a", "b"], params, progress=False)
        assert caught.value.param == "params"
    works(null)


@pytest.mark.parametrize("messages", ["hello", b"hello", None, 5, HI[0]])
def test_chat_wants_messages(null: LLM, messages: object) -> None:
    with pytest.raises(RequestError) as caught:
        null.chat(messages, THREE, progress=False)
    assert caught.value.param == "messages" and '"role": "user"' in caught.value.hint


def test_a_conversation_of_a_wrong_type_fails_alone(null: LLM) -> None:
    results = null.chat([HI, "hello", None, 5, HI], THREE, progress=False)
    assert [result.error is None for result in results] == [True, False, False, False, True]
    again = null.chat((talk for talk in [HI, HI]), THREE, progress=False)
    assert [result.completions for result in again] == [results[0].completions] * 2


async def test_a_name_that_the_template_does_not_know_is_refused(null: LLM, tmp_path) -> None:
    for options, param in (
        ({"nonsense": 1}, "nonsense"), ({"add_generation_promt": False}, "add_generation_promt"),
        ({"tools": 5}, "tools"), ({"tools": ["f"]}, "tools"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"), ({"documents": []}, "documents"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            null.chat(HI, THREE, progress=False, **options)
        assert caught.value.param == param
    with pytest.raises(RequestError, match="nonsense"):
        null.chat([HI, HI], THREE, progress=False, nonsense=1)
    with pytest.raises(RequestError) as caught:
        null.chat(HI, THREE, progress=False, add_generation_promt=False)
    assert "add_generation_prompt" in caught.value.hint
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{% if shout %}!{% endif %}{{ documents }}")
    async with await AsyncEngine.start(device="null", chat_template=str(template), in_process=True) as engine:
        ids = await engine.encode_chat(HI, shout=True, documents=["d"])
        assert engine.text.decode(ids) == "hi!['d']"
        with pytest.raises(RequestError, match="nonsense"):
            await engine.encode_chat(HI, nonsense=1)


def test_the_request_itself_is_checked_where_it_is_decoded() -> None:
    request = Request("r", [1], THREE)
    request.priority = 2**63  # too much for the other side, though it can be written
    with pytest.raises(RequestError, match="priority"):
        wire.decode_mail(wire.encode_mail(Add(request)))
    assert wire.subject_of(wire.encode_mail(Add(request))) == "r"
