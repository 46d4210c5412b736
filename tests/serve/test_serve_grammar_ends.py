"""The processes for structured output, seen over HTTP: one that is stopped, and the end of all."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from serve_drive import serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
PLAIN = {"prompt": [9, 8, 7, 6], "temperature": 0, "ignore_eos": True}


def test_a_grammar_process_that_is_stopped_ends_bound_requests_alone(monkeypatch) -> None:
    """Those that it follows get an error within its time, and the next ones another process."""
    from tandem.sampling import grammar, grammar_process

    grammar.close()
    monkeypatch.setattr(grammar_process, "LOOK_S", 0.1)
    bound = {"messages": HI, "max_tokens": 900, "guided_regex": "(ab)+"}
    with serving(max_model_len=2048, script="ab" * 450, step_s=0.005) as served, ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(served.post, CHAT, bound)]
        streams = [threads.submit(served.events, CHAT, bound)]
        plain = threads.submit(served.post, COMPLETIONS, {**PLAIN, "max_tokens": 400})
        while served.statistics()["engine"]["planner"]["num_running"] < 3:
            time.sleep(0.02)
        [stopped] = [process for process in grammar.processes() if process.name == "follow"]
        os.kill(stopped.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        answer, events = answers[0].result(10), streams[0].result(10)
        assert time.monotonic() - began_s < 3
        assert answer.status_code == 503 and answer.headers["retry-after"]
        for error in (answer.json()["error"], events[-1]["error"]):
            assert error["code"] == "overloaded" and "did not answer for" in error["message"], error
        assert plain.result(10).json()["usage"]["completion_tokens"] == 400
        assert re.match("(ab)+", served.chat(guided_regex="(ab)+", max_tokens=9)["choices"][0]["message"]["content"])
        served.at_rest()


def test_the_last_engine_that_closes_ends_the_grammar_processes() -> None:
    from tandem.sampling import grammar

    with serving(max_model_len=256) as served:
        served.chat(guided_choice=["yes", "no"], max_tokens=9)
        users, processes = grammar._users, grammar.processes()
        assert processes and not any(process.is_lost for process in processes)
    assert grammar._users == users - 1
    assert grammar._users or all(process.is_lost for process in processes)
