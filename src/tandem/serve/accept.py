"""From a decoded body to SamplingParams: each field is honoured or refused by name. It does not know tokens or HTTP."""

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.errors import RequestError
from tandem.request import Constraint, SamplingParams
from tandem.serve.failure import reworded
from tandem.serve.refusals import (
    CHAT,
    COMPLETIONS,
    MAX_TOKEN_IDS,
    STREAM_OPTIONS,
    STRUCTURED_OUTPUTS,
    check_count,
    check_labels,
    check_metadata,
    refuse,
)
from tandem.serve.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)

MAX_CONSTRAINT_BYTES = 64 * 1024
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
FORMAT_FIELDS = ("json_schema", "regex", "choice", "grammar")
FORMAT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Fields with the meaning and name that SamplingParams has.
DIRECT = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator allows. Bytes, counts and seconds.

    max_answers           of one request: prompts times n.
    max_answer_logprobs   log-probabilities in one answer that is held until its end, as often as they are shown.
    """

    body_bytes: int = 4 << 20
    max_n: int = 16
    max_prompts: int = 256
    deadline_s: float = 3600.0
    max_answers: int = 256
    max_answer_logprobs: int = 1 << 20


def chat_params(body: ChatRequest, defaults: dict[str, Any], limits: Limits) -> SamplingParams:
    """SamplingParams of a chat request; constraint of response_format included, tools not."""
    refuse(body, CHAT)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens differ; give one.", param="max_tokens")
    values = _shared(body, defaults, limits)
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    values["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    values["constraint"] = constraint_of(body, body.response_format)
    return _build(values, {"logprobs": "top_logprobs"})


def completion_params(body: CompletionRequest, defaults: dict[str, Any], limits: Limits) -> SamplingParams:
    """SamplingParams of a completion request. max_tokens defaults to 16, as in the OpenAI API."""
    refuse(body, COMPLETIONS)
    if body.best_of not in (None, body.n or 1):
        raise RequestError("best_of is not supported beyond n.", param="best_of", code="unsupported_value")
    if body.echo and body.stream and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported in a stream.", param="echo", code="unsupported_value")
    values = _shared(body, {"max_tokens": 16, **defaults}, limits)
    if body.max_tokens == 0:
        if not body.echo:
            raise RequestError("max_tokens is 0; without echo that asks for nothing.", param="max_tokens")
        values["max_tokens"] = 1  # computing the prompt gives one, which is not shown
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    values["constraint"] = constraint_of(body, body.response_format)
    return _build(values, {})


def _shared(body: Generation, defaults: dict[str, Any], limits: Limits) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs is not supported in a stream.", param="prompt_logprobs")
    if body.stream_options is not None:
        refuse(body.stream_options, STREAM_OPTIONS, param="stream_options", path="stream_options.")
    check_metadata(body.metadata)
    check_labels(body)
    check_count("logit_bias", body.logit_bias, MAX_TOKEN_IDS, "token ids")
    check_count("stop_token_ids", body.stop_token_ids, MAX_TOKEN_IDS, "token ids")
    values: dict[str, Any] = dict(defaults)
    values.update({name: getattr(body, name) for name in DIRECT if getattr(body, name) is not None})
    if body.stop_token_ids:
        values["stop_token_ids"] = tuple(dict.fromkeys(body.stop_token_ids))  # so that the vocabulary bounds them
    if body.max_tokens is not None:
        values["max_tokens"] = body.max_tokens
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        values["logit_bias"] = tuple((_token_id(key), bias) for key, bias in body.logit_bias.items())
    if body.n is not None and not 1 <= body.n <= limits.max_n:
        raise RequestError(f"n is {body.n}; it must be from 1 to {limits.max_n}.", param="n")
    if body.timeout_s is not None and not 0 < body.timeout_s <= limits.deadline_s:
        raise RequestError(f"timeout_s must lie above 0 and up to {limits.deadline_s:g}.", param="timeout_s")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= 256:
        raise RequestError("cache_salt must have 1 to 256 characters.", param="cache_salt")
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise RequestError("priority must be a 32-bit integer.", param="priority")
    return values


def _build(values: dict[str, Any], words: dict[str, str]) -> SamplingParams:
    """SamplingParams, its errors naming the field that the client wrote."""
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise reworded(error, words) from None


def _token_id(key: str) -> int:
    """The id, written plainly: int() alone also takes " 5", "+5", "05", "1_0" and other alphabets' digits."""
    if not TOKEN_ID.fullmatch(key):
        raise RequestError(f"logit_bias names {key!r:.80}, which is no token id.", param="logit_bias")
    return int(key)


def constraint_of(body: Generation, response_format: ResponseFormat | None) -> Constraint | None:
    """The one grammar that response_format or an extension (guided_*, structured_outputs) asks for."""
    asked: list[tuple[str, Constraint]] = []
    if response_format is not None and (wanted := _from_format(response_format)) is not None:
        asked.append(("response_format", wanted))
    if body.guided_json is not None:
        schema = body.guided_json if isinstance(body.guided_json, str) else schema_text("guided_json", body.guided_json)
        asked.append(("guided_json", Constraint("json_schema", schema)))
    if body.guided_regex is not None:
        asked.append(("guided_regex", Constraint("regex", body.guided_regex)))
    if body.guided_choice is not None:
        asked.append(("guided_choice", _choice("guided_choice", body.guided_choice)))
    if body.guided_grammar is not None:
        asked.append(("guided_grammar", Constraint("grammar", body.guided_grammar)))
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", _from_structured_outputs(body.structured_outputs)))
    if len(asked) > 1:
        raise RequestError(f"{asked[0][0]} and {asked[1][0]} exclude each other.", param=asked[1][0])
    for param, constraint in asked:
        if len(constraint.text) > MAX_CONSTRAINT_BYTES:
            raise RequestError(
                f"{param} has {len(constraint.text)} characters; the limit is {MAX_CONSTRAINT_BYTES}.", param=param
            )
    return asked[0][1] if asked else None


def _from_structured_outputs(wanted: StructuredOutputs) -> Constraint:
    param = "structured_outputs"
    refuse(wanted, STRUCTURED_OUTPUTS, param=param, path=f"{param}.")
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    given = [kind for kind in kinds if getattr(wanted, kind) not in (None, False)]
    if len(given) != 1:
        raise RequestError(f"{param} must have one of {', '.join(kinds)}; it has {len(given)}.", param=param)
    kind, value = given[0], getattr(wanted, given[0])
    if kind == "json_object":
        return Constraint("json_object", "")
    if kind == "json":
        return Constraint("json_schema", value if isinstance(value, str) else schema_text(param, value))
    return _choice(param, value) if isinstance(value, list) else Constraint(kind, value)


def _from_format(wanted: ResponseFormat) -> Constraint | None:
    kinds = ("text", "json_object", *FORMAT_FIELDS)
    if wanted.type not in kinds:
        raise RequestError(
            f"response_format.type is {wanted.type!r:.80}; it must be one of {', '.join(kinds)}, the last four with "
            "the field of that name.",
            param="response_format",
        )
    for name in (*FORMAT_FIELDS, "schema"):
        if name != wanted.type and getattr(wanted, name) is not None:
            raise RequestError(
                f"response_format.{name} does not go with the type {wanted.type}.", param="response_format",
                hint="a JSON schema goes with the type json_schema, as json_schema.schema.",
            )  # fmt: skip
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json_object", "")
    if wanted.type == "json_schema":
        return _from_schema(wanted.json_schema)
    value = getattr(wanted, wanted.type)
    if value is None:
        raise RequestError(f"response_format.{wanted.type} is missing.", param="response_format")
    return _choice("response_format", value) if isinstance(value, list) else Constraint(wanted.type, value)


def _from_schema(wanted: JsonSchemaFormat | None) -> Constraint:
    if wanted is None or wanted.schema is None:
        raise RequestError("response_format.json_schema.schema is missing.", param="response_format")
    if wanted.name is not None and not FORMAT_NAME.fullmatch(wanted.name):
        raise RequestError(
            f"response_format.json_schema.name is {wanted.name!r:.80}; it has 1 to 64 letters, digits, _ and -.",
            param="response_format",
        )
    return Constraint("json_schema", schema_text("response_format", wanted.schema))


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def constraint_field(body: Generation) -> str:
    """The field that asks for the grammar."""
    return next((name for name in GUIDED if getattr(body, name) is not None), "response_format")


def schema_text(param: str, schema: Any) -> str:
    """The schema, written. Raises RequestError for one that is far too long, before it is."""
    num_bytes = len(msgspec.json.encode(schema))  # no more than there would be characters, and quickly told
    if num_bytes > MAX_CONSTRAINT_BYTES:
        raise RequestError(
            f"{param} has {num_bytes} characters or more; the limit is {MAX_CONSTRAINT_BYTES}.", param=param
        )
    try:
        return json.dumps(schema)
    except RecursionError:
        raise RequestError("the schema is nested too deep.", param=param) from None


def _choice(param: str, options: list[str]) -> Constraint:
    if not options or len(options) > 1000:
        raise RequestError(f"{param} needs 1 to 1000 choices.", param=param)
    return Constraint("choice", schema_text(param, options))
