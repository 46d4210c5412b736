"""Chat templates: the text that transformers gives, one BOS, refusals with the template's own words, bounds."""

import os
from pathlib import Path

import pytest
from text_tokenizers import byte_level_text
from transformers.utils.chat_template_utils import render_jinja_template

import tandem.engine.chat as chat
from tandem.engine.chat import ChatTemplate, require_template
from tandem.engine.messages import checked_messages
from tandem.errors import ModelError, RequestError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FANCY = """
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {%- if loop.index > 1 %}{% break %}{% endif %}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- set ns = namespace(turn=0) %}
{% for m in messages %}
    {%- if m.role == 'assistant' %}
{% generation %}
    {{- m.content }}{% endgeneration %}
    {%- elif m.role == 'system' %}{% continue %}
    {%- else %}
        {%- set ns.turn = ns.turn + 1 %}
  {{ ns.turn }}: {{ m.content | trim }} {{ {'b': 'ü<', 'a': [1, none, true]} | tojson(indent=2) }}
    {%- endif %}
{% endfor %}
{{ strftime_now('%Y') | length }} {{ '=' * 3 }} {{ 2 ** 4 }}
"""
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " Hi 日本語 <b>&amp; "},
    {"role": "assistant", "content": "Hello m"},
    {"role": "user", "content": "Bye"},
]
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "description": "ü < 2"}} for i in range(3)]


def embedded_template() -> str | None:
    """The embedded model's own template, if its file lies in the cache."""
    root = os.environ.get("TANDEM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem"
    path = Path(root) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        return None
    from tandem.weights.source import locate

    return locate(str(path)).chat_template


@pytest.mark.parametrize("source", [CHATML, WITH_BOS, FANCY], ids=["chatml", "bos", "fancy"])
@pytest.mark.parametrize("prompted", [True, False])
def test_same_text_as_transformers(source, prompted):
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(TALK, TOOLS, add_generation_prompt=prompted)
    theirs = render_jinja_template(
        [TALK], TOOLS, chat_template=source, add_generation_prompt=prompted, bos_token="<s>", eos_token="</s>"
    )[0][0]
    assert ours == theirs and "Hi 日本語" in ours


@pytest.mark.model
def test_same_text_as_transformers_for_the_embedded_model():
    source = embedded_template()
    if source is None:
        pytest.skip("the embedded model is not in the cache")
    for talk in (TALK, TALK[1:], TALK[1:2]):
        for prompted in (True, False):
            ours = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>").render(
                talk, add_generation_prompt=prompted
            )
            theirs = render_jinja_template([talk], chat_template=source, add_generation_prompt=prompted)[0][0]
            assert ours == theirs and "<|im_start|>user\n" in ours


def called(content: str | None, *cities: str) -> dict:
    calls = [{"id": f"call0000{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"city": "{city}"}}'}}
             for i, city in enumerate(cities)]  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_calls_that_a_template_leaves_out_are_written_into_the_content():
    talk = [TALK[1], called("Let me see.", "Rome", "ü"), {"role": "tool", "content": "sunny", "tool_call_id": "x"}]
    text = ChatTemplate(CHATML).render([*talk, called(None, "Oslo")], add_generation_prompt=False)
    rome, umlaut, oslo = (
        f'<tool_call>{{"name": "f", "arguments": {{"city": "{city}"}}}}</tool_call>' for city in ("Rome", "ü", "Oslo")
    )
    ids = [call["id"] for call in talk[1]["tool_calls"]]
    rome, umlaut = (
        one.replace('{"name"', f'{{"id": "{own}", "name"', 1) for one, own in zip((rome, umlaut), ids, strict=True)
    )
    result = "<tool_response>\nsunny\n</tool_response>"
    assert f"assistant\nLet me see.\n{rome}\n{umlaut}<|im_end|>\n<|im_start|>user\n{result}<|im_end|>" in text
    assert text.endswith(f"assistant\n{oslo}<|im_end|>\n")
    assert talk[1]["content"] == "Let me see." and len(talk[1]["tool_calls"]) == 2, "the caller's are unchanged"


def test_calls_that_a_template_writes_are_left_to_it():
    own = "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls %}({{ c.function.name }}{{ c.function."
    own += "arguments | tojson }}){% endfor %}{% endfor %}"
    assert ChatTemplate(own).render([called("", "Rome")]) == '[](f{"city": "Rome"})'
    picky = "{% if messages | length != 1 %}{{ raise_exception('one only') }}{% endif %}" + own
    assert ChatTemplate(picky).render([called("", "Rome")]) == '[](f{"city": "Rome"})'


def test_calls_that_a_template_with_tools_leaves_out_are_refused():
    """It has a way of its own to write calls, which nobody knows here."""
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls") as caught:
        ChatTemplate("{{ tools }}" + CHATML).render([TALK[1], called("", "Rome")])
    assert caught.value.param == "messages"


def test_c24_no_template():
    """C24 (i): a refusal that says so, and works with a template given at start."""
    with pytest.raises(RequestError, match="no chat template"):
        require_template(None)
    assert (
        require_template(ChatTemplate(CHATML)).render(TALK[3:])
        == "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_c24_the_templates_own_words():
    """C24 (ii): a template that refuses roles; (also) one that trips over what it was given."""
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role!') }}{% endif %}"
    with pytest.raises(RequestError, match="no system role!") as caught:
        ChatTemplate(source).render(TALK)
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="cannot render"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(TALK)
    with pytest.raises(RequestError, match="undefined"):
        ChatTemplate("{{ nobody.knows }}").render(TALK)


def test_c24_a_syntax_error_is_an_error_at_start():
    """C24 (iii)."""
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("text\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10 ** 8 }}",
        "{{ 7 ** 99999999 }}",
        "{% for a in range(10 ** 7) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_c24_templates_stay_in_their_sandbox(source, monkeypatch):
    """C24 (iv): nothing outside is reached, nothing is changed, time and size have bounds."""
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.3)
    with pytest.raises(RequestError):
        ChatTemplate(source).render(TALK)


def test_c25_one_bos_and_the_header_only_when_asked():
    """C25: the template writes BOS, the tokenizer would add one; the ids have one."""
    text = byte_level_text(add_bos=True)
    template = ChatTemplate(WITH_BOS, bos_token="<s>", eos_token="</s>")
    for prompted in (True, False):
        rendered = template.render(TALK, add_generation_prompt=prompted)
        assert rendered.endswith("[assistant]") == prompted
        for special in (True, False):
            ids = text.encode(rendered, add_special_tokens=special)
            assert ids[0] == text.bos_id and ids.count(text.bos_id) == 1


@pytest.mark.parametrize("source", [CHATML, WITH_BOS])
@pytest.mark.parametrize("content", ["Hello m", "m", "  spaces  ", "", "assistant"])
def test_c25_a_continued_message_has_no_end(source, content):
    """C25: also where the content occurs elsewhere in the text, and where the template trims contents."""
    talk = [*TALK, {"role": "assistant", "content": content}]
    rendered = ChatTemplate(source, bos_token="<s>").render(
        talk, add_generation_prompt=False, continue_final_message=True
    )
    before = ChatTemplate(source, bos_token="<s>").render(TALK, add_generation_prompt=False)
    header = "<|im_start|>assistant\n" if source is CHATML else "[assistant]"
    assert rendered == before + header + (content.strip() if source is WITH_BOS else content)


def test_c25_both_flags_contradict_each_other():
    with pytest.raises(RequestError, match="contradict") as caught:
        ChatTemplate(CHATML).render(TALK, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(RequestError, match="cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(TALK, add_generation_prompt=False, continue_final_message=True)


def test_content_parts_are_joined_in_order():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert checked_messages([{"role": "user", "content": parts}])[0]["content"] == "one two"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (plain,) = checked_messages([message])
    assert plain["content"] == "" and plain["tool_calls"] == [call]
    assert call["function"]["arguments"] == '{"a": 1}', "the caller's own stays as it was"
    assert checked_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


@pytest.mark.parametrize(
    "messages",
    [
        "hi", [], {"role": "user"}, ["hi"], [{"role": "wizard", "content": "x"}], [{"content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": 3}], [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "assistant", "tool_calls": ["f"]}], [{"role": "assistant", "tool_calls": 3}],
    ],
)  # fmt: skip
def test_ill_formed_messages_are_refused(messages):
    with pytest.raises(RequestError) as caught:
        checked_messages(messages)
    assert caught.value.param == "messages"
