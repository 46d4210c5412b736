"""Answers on the null device: shapes, streams against wholes, usage, log-probabilities, names, explanations."""

import json
import time

import pytest
from serve_drive import Served, serving

from tandem.serve.options import ServeOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def joined(events: list) -> dict:
    """What the chunks of a one-choice stream add up to."""
    text, finish, entries, tokens = "", [], [], []
    for event in events[:-1]:
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            entries += (choice["logprobs"] or {}).get("content") or []
            tokens += choice.get("token_ids") or []
    assert len(finish) == 1
    return {"text": text, "finish": finish[0], "entries": entries, "tokens": tokens}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
def test_c12_usage_chunk_only_when_asked(null: Served, path: str, options: dict | None) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    events = null.events(path, {**body, "max_tokens": 5, "ignore_eos": True, "stream_options": options})
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(usage) == (1 if options and options.get("include_usage") else 0)
    if usage:
        assert chunks[-1] is usage[0] and usage[0]["choices"] == []
        assert usage[0]["usage"]["completion_tokens"] == 5
        chunks = chunks[:-1]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in events[:-1]}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if path == CHAT:
        assert ["role" in c["choices"][0]["delta"] for c in chunks] == [True] + [False] * (len(chunks) - 1)


def test_c12_stream_options_without_stream(null: Served) -> None:
    for stream in (False, None):
        body = {"prompt": "hi", "stream": stream, "stream_options": {"include_usage": True}}
        null.refused(COMPLETIONS, body, param="stream_options")


def test_stream_and_whole_are_the_same(null: Served) -> None:
    body = {
        "messages": HI, "max_tokens": 40, "seed": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 2,
        "return_token_ids": True, "n": 1,
    }  # fmt: skip
    whole = null.chat(**{k: v for k, v in body.items() if k != "messages"})
    events = null.events(CHAT, body | {"stream_options": {"include_usage": True}})
    got, choice = joined(events), whole["choices"][0]
    assert got["text"] == choice["message"]["content"] and got["finish"] == choice["finish_reason"] == "length"
    assert got["tokens"] == choice["token_ids"] and len(got["tokens"]) == 40
    assert got["entries"] == choice["logprobs"]["content"]
    drop = {"prompt_tokens_details"}
    assert {k: v for k, v in events[-2]["usage"].items() if k not in drop} == {
        k: v for k, v in whole["usage"].items() if k not in drop
    }


def test_n_answers_and_many_prompts(null: Served) -> None:
    body = {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 4, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    whole = null.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 4 and whole["usage"]["completion_tokens"] == 24
    tokens = [choice["token_ids"] for choice in whole["choices"]]
    assert len({tuple(t) for t in tokens}) == 6
    streamed: dict[int, list[int]] = {}
    for event in null.events(COMPLETIONS, body)[:-1]:
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[i] for i in range(6)] == tokens
    ids = null.complete(**{**body, "prompt": [[100, 101], [102, 103]]})
    assert len(ids["choices"]) == 6


def test_c13_a_stream_that_cannot_begin_is_a_plain_refusal(null: Served) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}),
        (COMPLETIONS, {"prompt": [5] * 600}),
    ):
        error = null.refused(path, {**body, "stream": True})
        assert error["code"] == "context_length_exceeded"


def test_c13_failures_before_and_behind_the_first_token() -> None:
    with serving(fail_at_prompt=70, max_model_len=512) as served:
        served.canary()
        for stream in (True, False):
            error = served.refused(COMPLETIONS, {"prompt": [70, 71], "stream": stream}, status=500)
            assert error["code"] == "internal_error"
        assert served.service.ended["failed"] == 2
        served.canary()
    with serving(arm_at_prompt=[71, "raise_at", 5], step_s=0.02, max_model_len=512) as served:
        events = served.events(COMPLETIONS, {"prompt": [71, 71], "max_tokens": 100, "ignore_eos": True})
        assert "[DONE]" not in events and events[-1]["error"]["code"] == "engine_dead"
        assert 1 <= len(events) - 1 <= 5 and all(e["choices"][0]["finish_reason"] is None for e in events[:-1])


def test_c14_keep_alives_are_comments() -> None:
    options = ServeOptions(keep_alive=0.1)
    with serving(options, step_s=0.03, max_num_seqs=1, max_model_len=512) as served:
        body = {"prompt": "busy", "max_tokens": 25, "ignore_eos": True}
        with served.http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as busy:
            pieces = busy.iter_raw()  # dropping it would close the stream
            next(pieces)
            began_s = time.monotonic()
            with served.http.stream("POST", COMPLETIONS, json={**body, "max_tokens": 2, "stream": True}) as answer:
                raw = b"".join(answer.iter_raw())
        assert time.monotonic() - began_s > 0.4
        records = raw.split(b"\n\n")
        assert records[-1] == b"" and records.count(b": keep-alive") >= 3
        assert all(r.startswith((b"data: {", b"data: [DONE]", b": keep-alive")) for r in records[:-1])
        whole = served.complete(**body)
        assert whole["usage"]["completion_tokens"] == 25
        served.at_rest()


def test_c18_chat_logprobs(null: Served) -> None:
    for top, temperature, top_k in ((None, 0, None), (0, 5, None), (5, 0.01, 1), (5, 1, None)):
        body = {"max_tokens": 3, "ignore_eos": True, "logprobs": True, "temperature": temperature, "top_k": top_k}
        answer = null.chat(**body, top_logprobs=top)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == 3
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == (top or 0) and entry["logprob"] <= 0
    null.refused(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, param="top_logprobs")
    null.refused(CHAT, {"messages": HI, "top_logprobs": 5}, param="top_logprobs")
    assert null.chat(max_tokens=1)["choices"][0]["logprobs"] is None


def test_c18_completion_logprobs(null: Served) -> None:
    for top in (0, 5):
        logprobs = null.complete(max_tokens=3, ignore_eos=True, logprobs=top)["choices"][0]["logprobs"]
        assert {len(logprobs[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {3}
        assert all(len(best) == top for best in logprobs["top_logprobs"]) and logprobs["text_offset"][0] == 0
    null.refused(COMPLETIONS, {"prompt": "a", "logprobs": 21}, param="logprobs")


def test_c09_prompt_logprobs_are_whole_and_capped(null: Served) -> None:
    prompt = [3 + i % 200 for i in range(511)]
    answers = [null.complete(prompt, echo=True, logprobs=5, max_tokens=1) for _ in range(2)]
    for answer in answers:
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == 512 and logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None and all(v <= 0 for v in logprobs["token_logprobs"][1:])
    for value in (259, -1, 1000):
        null.refused(
            COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": value, "max_tokens": 1}, param="logprobs"
        )
    shown = null.complete([5, 6, 7], prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert shown[0] is None and "6" in shown[1] and "7" in shown[2]
    null.refused(COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, param="prompt_logprobs")


def test_c35_cached_tokens_never_reach_the_prompt(null: Served) -> None:
    for length in (32, 31, 33, 48):
        prompt = [3 + (i * 7 + length) % 250 for i in range(length)]
        body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        first, second = null.complete(prompt, **body), null.complete(prompt, **body)
        assert first["choices"] == second["choices"]
        usage = second["usage"]
        assert usage["prompt_tokens"] == length
        assert 16 <= usage["prompt_tokens_details"]["cached_tokens"] <= length - 1


def test_c40_names_match_exactly(null: Served) -> None:
    listed = null.http.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny:1b", "org/tiny"] and listed["object"] == "list"
    assert all({"id", "object", "created", "owned_by"} <= set(card) for card in listed["data"])
    for name in ("tiny:1b", "org/tiny"):
        assert null.complete(model=name, max_tokens=1)["model"] == name
        assert null.http.get(f"/v1/models/{name}").json()["id"] == name
    for name in (None, ...):
        body = {"prompt": "a", "max_tokens": 1} | ({} if name is ... else {"model": name})
        assert null.post(COMPLETIONS, body).json()["model"] == "tiny:1b"
    for name in ("tiny", "TINY:1B", "", "tiny:1b ", "org/tiny/"):
        assert null.refused(COMPLETIONS, {"prompt": "a", "model": name}, 404)["code"] == "model_not_found"
    null.refused(COMPLETIONS, {"prompt": "a", "model": 123}, param="model")
    assert null.http.get("/v1/models/unknown").status_code == 404


def test_echo_and_zero_tokens(null: Served) -> None:
    echoed = null.complete("prompt text", echo=True, max_tokens=0, logprobs=1)
    choice = echoed["choices"][0]
    assert choice["text"] == "prompt text" and choice["finish_reason"] == "length"
    assert echoed["usage"]["completion_tokens"] == 0 and len(choice["logprobs"]["tokens"]) == 11
    assert choice["logprobs"]["token_logprobs"][0] is None
    events = null.events(COMPLETIONS, {"prompt": "abc", "echo": True, "max_tokens": 2, "ignore_eos": True})
    assert joined(events)["text"].startswith("abc")


def test_explain_accounts_for_the_whole_time() -> None:
    with serving(step_s=0.02, max_model_len=512) as served:
        for stream in (False, True):
            body = {"messages": HI, "max_tokens": 15, "ignore_eos": True, "explain": True, "n": 2, "stream": stream}
            began_s = time.monotonic()
            if stream:
                last = served.events(CHAT, body)[-2]
            else:
                last = served.post(CHAT, body).json()
            took_s = time.monotonic() - began_s
            account = last["explain"]
            for answer in [account, *account["answers"]]:
                assert sum(answer["parts_s"].values()) == pytest.approx(answer["total_s"], rel=0.01)
            assert len(account["answers"]) == 2
            assert account["total_s"] == pytest.approx(took_s, abs=0.1) and account["parts_s"]["decode"] > 0.2
            later = served.http.get(f"/explain/{last['id']}").json()
            assert later["id"] == last["id"] and len(later["answers"]) == 2
            assert sum(later["parts_s"].values()) == pytest.approx(later["total_s"], rel=0.01)
        served.refused("/explain/x", None, 405)
        assert served.http.get("/explain/unknown").status_code == 404


def test_small_routes(null: Served) -> None:
    assert null.http.get("/health").json() == {"status": "ok"} and null.http.get("/ready").status_code == 200
    assert "version" in null.http.get("/version").json()
    tokens = null.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert tokens["count"] == 3 and tokens["max_model_len"] == 512 and tokens["token_strs"][0] == "h"
    assert null.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
    assert null.post("/tokenize", {"messages": HI}).json()["count"] > 5
    null.refused("/tokenize", {}, param="prompt")
    null.refused("/detokenize", {"tokens": [259]}, param="tokens")
    error = null.refused("/v1/embeddings", {"input": "x"})
    assert error["code"] == "unsupported_endpoint"
    answer = null.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert answer.headers["x-request-id"] == answer.json()["id"]


def test_openapi_describes_every_route(null: Served) -> None:
    from tandem.serve.app import ROUTES

    document = null.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    routes = {getattr(route, "path", "").replace(":path", "") for route in ROUTES}
    assert set(document["paths"]) <= routes
    assert {path for path in routes if path.startswith("/v1/")} - set(document["paths"]) == {"/v1/embeddings"}
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "top_k", "explain"} <= set(fields)
    json.dumps(document)


def test_priority_needs_its_policy(null: Served) -> None:
    null.refused(COMPLETIONS, {"prompt": "a", "priority": 3}, param="priority")
    null.complete(priority=0, max_tokens=1)
    with serving(policy="priority") as served:
        served.complete(priority=-5, max_tokens=1)
        served.at_rest()


def test_keys_guard_every_route_but_health() -> None:
    with serving(ServeOptions(cors_origin=["https://a.example"]), keys=("s3cret", "other")) as served:
        bare = {"authorization": ""}
        for method, path in (("GET", "/v1/models"), ("POST", COMPLETIONS), ("GET", "/load"), ("GET", "/metrics")):
            answer = served.http.request(method, path, headers=bare)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert served.http.get("/health", headers=bare).status_code == 200
        for key in ("s3cre", "s3crets", "ö"):
            wrong = served.http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert wrong.status_code == 401
        assert served.http.get("/v1/models", headers={"authorization": "bearer other"}).status_code == 200
        assert served.http.get("/v1/models", headers={**bare, "x-api-key": "other"}).status_code == 200
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = served.http.options(COMPLETIONS, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = served.http.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_limits_turn_into_429_and_503() -> None:
    options = ServeOptions(max_requests=2, max_queued_tokens=100, queue_timeout=0.3, max_time=2.0, max_n=2)
    with serving(options, step_s=0.05, max_num_seqs=1, max_model_len=512) as served:
        served.refused(COMPLETIONS, {"prompt": "a", "n": 3}, param="n")
        served.refused(COMPLETIONS, {"prompt": "a", "timeout_s": 3}, param="timeout_s")
        long = {"prompt": "abcd", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", COMPLETIONS, json=long) as first:
            pieces = first.iter_raw()  # dropping it would close the stream
            next(pieces)
            error = served.refused(COMPLETIONS, {"prompt": "x" * 97}, 429)
            assert error["code"] == "queue_full" and "100" in error["message"] and error["type"] == "rate_limit_error"
            assert served.refused(COMPLETIONS, {"prompt": "x"}, 503)["code"] == "queue_timeout"
        served.at_rest()
        assert (
            served.refused(COMPLETIONS, {**long, "stream": False, "timeout_s": 0.2}, 504)["code"] == "deadline_exceeded"
        )
        served.at_rest()
    with serving(ServeOptions(max_requests=1), step_s=0.05, max_model_len=512) as served:
        with served.http.stream("POST", COMPLETIONS, json=long) as first:
            pieces = first.iter_raw()
            next(pieces)
            answer = served.post(COMPLETIONS, {"prompt": "x"})
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        served.at_rest()
