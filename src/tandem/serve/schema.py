"""The bodies that clients send, as typed structures. It knows their shapes; it does not know what is honoured.

Decoding is strict: a wrong type is refused with the path to it, an unknown field of a body or of a part is refused by
name (as the OpenAI API does: whoever sends it counts on it), but for those of OPEN, and null means "not given". Field
names and meanings: OpenAI API reference; those marked "extension" are tandem's, with the names the field uses.
"""

from typing import Any, Literal

from msgspec import Struct, field

Json = dict[str, Any]


class StreamOptions(Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    # extension
    continuous_usage_stats: bool | None = None


class ResponsesStreamOptions(Struct):
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Struct):
    """name is a label that changes no answer; unlike in the OpenAI API it may be left out."""

    name: str | None = None
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """type: text, json_object, json_schema; as an extension regex, choice or grammar, with the field of that name."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    # refused: some servers read a schema here
    schema: Any = None


class StructuredOutputs(Struct):
    """vLLM's way to ask for a grammar: one of the first five."""

    json: Json | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # refused but for values that ask for nothing
    structural_tag: Any = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ToolDemands(Struct, kw_only=True):
    """Parts of a tool, or of its function, that ask for what is not done here: refused but for values that do not."""

    allowed_callers: Any = None
    defer_loading: Any = None
    async_: Any = field(default=None, name="async")


class FunctionTool(ToolDemands):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(ToolDemands):
    """strict: for clients that write it here; the function's own comes first."""

    type: str
    function: FunctionTool | None = None
    strict: bool | None = None


class NamedFunction(Struct):
    name: str


class NamedToolChoice(Struct):
    type: str
    function: NamedFunction | None = None


class Generation(Struct, kw_only=True):
    """What all generating endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    explain: bool | None = None
    timeout_s: float | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Json]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # refused but for values that ask for nothing; see refusals.py
    moderation: Any = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    # extensions
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    echo: bool | None = None


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class ResponsesTextFormat(Struct):
    type: str
    name: str | None = None
    schema: Json | None = None
    strict: bool | None = None
    description: str | None = None


class ResponsesText(Struct):
    format: ResponsesTextFormat | None = None
    verbosity: str | None = None


class ResponsesTool(ToolDemands):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    # refused, whatever it holds
    output_schema: Any = None


class ResponsesNamedTool(Struct):
    type: str
    name: str | None = None


class Reasoning(Struct):
    effort: str | None = None
    # refused but for values that ask for nothing
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses, the stateless part: nothing is stored, nothing refers to an earlier response."""

    model: str | None = None
    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    stream_options: ResponsesStreamOptions | None = None
    # refused but for values that ask for nothing; see refusals.py
    moderation: Any = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    context_management: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    background_options: Json | None = None
    access_programs: Json | None = None
    image: Json | None = None
    # extensions
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    explain: bool | None = None
    timeout_s: float | None = None


# Clients write hints, labels and other APIs' parts into these: what is unknown in them is passed over.
OPEN = (Tool, FunctionTool, NamedToolChoice, NamedFunction, ResponsesTool, ResponsesNamedTool)
# What each generating endpoint would not understand, though others do: refused rather than ignored as the unknown is.
_GENERATING = (ChatRequest, CompletionRequest, ResponsesRequest)
_KNOWN = frozenset(name for kind in _GENERATING for name in kind.__struct_fields__)
MISPLACED: dict[type, frozenset[str]] = {kind: _KNOWN.difference(kind.__struct_fields__) for kind in _GENERATING}
