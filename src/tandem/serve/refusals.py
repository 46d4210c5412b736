"""Fields of the OpenAI API that are not honoured here: what each may say all the same, and why it may say no more.

A neutral value asks for what happens anyway (nothing cached beyond this process, no moderation, no summary), so that
clients which send it by default are served. Every other value is refused by name: nothing is ignored silently.
"""

from collections.abc import Mapping, Sized
from keyword import iskeyword
from reprlib import repr as short
from typing import Any, NamedTuple

from tandem.errors import RequestError

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
LABELS = ("user", "safety_identifier", "prompt_cache_key")
MAX_LABEL = 512
# How many of each a body may hold. Looked at before anything goes over them: a body of 4 MiB holds a million.
MAX_MESSAGES = 4096
MAX_PARTS = 16384
MAX_VALUES = 64
MAX_TOKEN_IDS = 4096


class Refusal(NamedTuple):
    """why: a sentence for the client.  neutral: values that ask for nothing; null always is one."""

    why: str
    neutral: tuple[Any, ...] = ()


# What several endpoints refuse.
SHARED = {
    "moderation": Refusal("there is no moderation here."),
    "prompt_cache_retention": Refusal(
        "cached prefixes are kept in memory, for no promised time.", ("in_memory", "in-memory")
    ),
    "prompt_cache_options": Refusal(
        "prefixes are cached by themselves, for no promised time; cache_salt keeps users apart.",
        ({}, {"mode": "implicit"}),
    ),
    "service_tier": Refusal("there is one tier.", ("auto", "default")),
    "store": Refusal("nothing is kept.", (False,)),
}
TEXT = {
    "verbosity": Refusal("the model's template knows no such choice.", ("medium",)),
}
CHAT = {
    **SHARED,
    "audio": Refusal("there is no audio output."),
    "functions": Refusal("functions is deprecated; use tools."),
    "function_call": Refusal("function_call is deprecated; use tool_choice."),
    "prediction": Refusal("there are no predicted outputs."),
    "web_search_options": Refusal("there is no web search."),
    "modalities": Refusal("answers are text.", (["text"],)),
    **TEXT,
    "chat_template": Refusal("a template sent by a client is not run here."),
    "echo": Refusal("echo is for /v1/completions; continue_final_message goes on with a message.", (False,)),
}
COMPLETIONS = {
    "service_tier": SHARED["service_tier"],
    "store": SHARED["store"],
    "suffix": Refusal("there is no insertion.", ("",)),
}
RESPONSES = {
    **SHARED,
    "previous_response_id": Refusal("nothing is stored here; send the whole conversation as input."),
    "conversation": Refusal("nothing is stored here; send the whole conversation as input."),
    "background": Refusal("answers are not computed in the background.", (False,)),
    "background_options": Refusal(
        "answers are not computed in the background.", ({}, {"completion_window": "soonest"})
    ),
    "access_programs": Refusal("there are no such programs here.", ({}, {"cyber": "standard"})),
    "image": Refusal(
        "there are no images here.", ({}, {"context_compression": "auto"}, {"context_compression": "disabled"})
    ),
    "prompt": Refusal("there are no stored prompts here."),
    "max_tool_calls": Refusal("there are no built-in tools whose calls could be counted."),
    "context_management": Refusal("input is never compacted here.", ([],)),
    "truncation": Refusal("input is never cut here.", ("disabled",)),
}
# Fields of other engines that clients send out of habit, with values (as JSON) that ask for nothing.
NEUTRAL = {
    "use_beam_search": (b"false",), "bad_words": (b"[]",), "allowed_token_ids": (b"[]",), "logits_processors": (b"[]",),
    "length_penalty": (b"1", b"1.0"), "spaces_between_special_tokens": (b"true",), "include_reasoning": (b"true",),
    "early_stopping": (b"false",), "typical_p": (b"1", b"1.0"), "no_repeat_ngram_size": (b"0",), "num_beams": (b"1",),
}  # fmt: skip
# Parts of a field; refused under the field's name.
STREAM_OPTIONS = {
    "include_obfuscation": Refusal("events are not padded.", (False,)),
}
STRUCTURED_OUTPUTS = {
    "structural_tag": Refusal("tags are not supported; use a grammar."),
    "disable_fallback": Refusal("there is one way to enforce a grammar.", (True, False)),
    "disable_any_whitespace": Refusal("whitespace between tokens of JSON is allowed.", (False,)),
    "disable_additional_properties": Refusal("write additionalProperties into the schema.", (False,)),
    "whitespace_pattern": Refusal("whitespace between tokens of JSON is allowed."),
}
REASONING = {
    "summary": Refusal("reasoning is given whole, never as a summary."),
    "generate_summary": Refusal("reasoning is given whole, never as a summary."),
    "context": Refusal("the model's template decides which earlier reasoning it sees.", ("auto",)),
    "mode": Refusal("there is one mode.", ("standard",)),
}
TOOL = {
    "allowed_callers": Refusal("only the model itself calls tools.", (["direct"], [])),
    "defer_loading": Refusal("there is no tool search.", (False,)),
    "async": Refusal("a conversation goes on when all its calls are answered.", (False,)),
}
RESPONSES_TOOL = {
    **TOOL,
    "output_schema": Refusal("outputs of tools are passed on as they come."),
}


def refuse(body: Any, table: Mapping[str, Refusal], *, param: str | None = None, path: str = "") -> None:
    """Raise RequestError for the first field of body that asks for what the table refuses.

    param, path   the field and the path to be named where body is only a part of a request.
    """
    for name, refusal in table.items():
        value = getattr(body, f"{name}_" if iskeyword(name) else name)
        if value is not None and not any(value == one and type(value) is type(one) for one in refusal.neutral):
            allowed = "".join(f", {one!r}" for one in refusal.neutral)
            raise RequestError(
                f"{path}{name} is {short(value)}, which is not supported: {refusal.why}",
                param=param or name, code="unsupported_value", hint=f"leave it out, or null{allowed}.",
            )  # fmt: skip


def check_count(param: str, items: Sized | None, limit: int, what: str) -> None:
    """Raise RequestError for more than so many items; what: what they are."""
    if items is not None and len(items) > limit:
        raise RequestError(f"{param} holds {len(items)} {what}; the limit is {limit}.", param=param)


def check_labels(body: Any) -> None:
    """Raise RequestError for a label that is too long: some are sent back, in several events."""
    for name in LABELS:
        label = getattr(body, name, None)
        if label is not None and len(label) > MAX_LABEL:
            raise RequestError(f"{name} has {len(label)} characters; the limit is {MAX_LABEL}.", param=name)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise RequestError for more than the API allows: 16 pairs, keys of 64 characters, values of 512."""
    pairs = metadata or {}
    if len(pairs) > MAX_METADATA or any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in pairs.items()):
        raise RequestError(
            f"metadata holds at most {MAX_METADATA} pairs of a key of up to {MAX_KEY} and a value of up to {MAX_VALUE} "
            "characters.",
            param="metadata",
        )
