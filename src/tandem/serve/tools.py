"""What a chat request's tools mean here: what the template is told, what the grammar forces, how answers are parsed.

Families write calls differently; which way a model writes is read off its own template. A model whose template knows
no tools is told of them in a system message, in the Hermes format, which most later families follow.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tandem.errors import RequestError
from tandem.request import Constraint
from tandem.serve.call_grammar import CallGrammar, SpecialId
from tandem.serve.calls import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, TAGGED, CallFormat, Calls
from tandem.serve.continued import continued
from tandem.serve.conversation import with_instruction
from tandem.serve.parse import THINK_OPEN, AnswerParser, Reasoning
from tandem.serve.refusals import TOOL, refuse
from tandem.serve.schema import ChatRequest, FunctionTool, NamedToolChoice
from tandem.serve.tagged_call import FUNCTION, MAX_NAME
from tandem.serve.value_kinds import ValueKinds

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 << 10
INSTRUCTION = (
    "You can call these functions, described as JSON schemas:\n{tools}\n"
    'To call one, write nothing but <tool_call>{{"name": NAME, "arguments": ARGUMENTS}}</tool_call>.'
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools, and what governs its answers.

    for_template   what the template gets.       instruction   what a system message says of tools and form.
    constraint     the answer's grammar.         constraint_param   the field it comes from, None: response_format.
    leaves_text    the grammar only governs calls: there is room for thoughts and text.
    forced         tools of which one must be called.
    kinds          of the parameters of tools, where calls are written between tags.
    """

    for_template: list[dict[str, Any]] | None = None
    instruction: str | None = None
    form: CallFormat | None = None
    names: tuple[str, ...] = ()
    single: bool = False
    constraint: Constraint | None = None
    constraint_param: str | None = None
    leaves_text: bool = False
    forced: tuple[str, ...] = ()
    kinds: ValueKinds | None = None

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation, with the instruction in its system message."""
        return list(messages) if self.instruction is None else with_instruction(messages, self.instruction)

    def parser(self, template: str | None, prompt_end: str, said: str = "") -> Callable[[], AnswerParser] | None:
        """Makes a parser for each answer; None if the text needs none. Raises RequestError, see continued.

        prompt_end   the prompt's last characters.      said   what of a message to be continued the prompt ends with.
        Where a grammar governs the answer from its first token on, there is no room for thoughts.
        """
        thinks = THINK_OPEN in (template or "") and (self.constraint is None or self.leaves_text)
        inside = thinks and prompt_end.rstrip().endswith(THINK_OPEN)
        if not thinks and self.form is None:
            return None

        use = replace(self, for_template=None, instruction=None)  # an answer has no need of what the prompt took

        def make() -> AnswerParser:
            calls = None
            if use.form is not None:
                alone = use.constraint is not None and not use.leaves_text
                # without an opening, an answer by a schema begins like a call
                governed = use.leaves_text or (alone and bool(use.form.opening))
                calls = Calls(
                    use.form,
                    use.names,
                    single=use.single,
                    governed=governed,
                    alone=alone,
                    forced=use.forced,
                    kinds=use.kinds,
                )
            if not thinks:
                assert calls is not None
                return calls
            return Reasoning(calls, inside=inside)

        if inside or not said.strip():
            return make
        governed = self.form is not None and self.constraint is not None
        begun = continued(make, said, is_governed=governed, shared=self.kinds)
        return make if begun is None else begun.copy


def format_of(template: str | None) -> CallFormat | None:
    """How the model writes tool calls, by its template; None: the template knows no tools."""
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template and FUNCTION in template:
        return TAGGED
    return HERMES if "<tool_call>" in template else LLAMA


def tool_use(
    body: ChatRequest, template: str | None, answer: Constraint | None = None, special_id: SpecialId = lambda text: None
) -> ToolUse:
    """Check tools and tool_choice. Raises RequestError naming the field.

    answer       the grammar that response_format asks for.      special_id   see call_grammar.
    """
    told = _description(body)
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a tool, but tools is empty.", param="tool_choice")
        return ToolUse(instruction=told, constraint=answer)
    tools = _checked(body)
    if choice == "none":
        return ToolUse(instruction=told, constraint=answer)
    forced = _forced(choice, tools)
    form = format_of(template)
    plain = [{"type": "function", "function": _described(tool)} for tool in tools]
    by_name = ARGS in (template or "")
    _check_writable(tools, form, by_name)
    told_tools = None if form is not None else INSTRUCTION.format(tools=json.dumps(plain))
    use = ToolUse(
        for_template=plain if form is not None else None,
        instruction="\n\n".join(text for text in (told_tools, told) if text) or None,
        form=form or HERMES,
        names=tuple(tool.name for tool in tools),
        single=body.parallel_tool_calls is False,
    )
    return _governed(use, tools, forced, answer, special_id, by_name=by_name)


def _governed(
    use: ToolUse, tools: Sequence[FunctionTool], forced: Sequence[FunctionTool], answer: Constraint | None,
    special_id: SpecialId, *, by_name: bool,
) -> ToolUse:  # fmt: skip
    """The same use, with the grammar of its answers if there must be one."""
    assert use.form is not None
    strict = any(tool.strict for tool in tools)
    if use.form.is_tagged:
        if forced or strict or answer is not None:
            what = "tool_choice" if forced else "strict tools" if strict else "tools beside response_format"
            raise RequestError(
                f"{what}: this model writes calls between tags (<function=…>), for which there is no grammar here.",
                param="tool_choice" if forced else "tools", code="unsupported_value",
                hint="use tool_choice auto, tools without strict, and no response_format: its calls are understood.",
            )  # fmt: skip
        return replace(use, kinds=ValueKinds({tool.name: tool.parameters or {} for tool in tools}))
    if forced:
        grammar = CallGrammar(use.form, forced, special_id, by_name=by_name).forced()
        names = tuple(tool.name for tool in forced)
        return replace(use, constraint=grammar, constraint_param="tools", forced=names)
    free_tools = [tool.name for tool in tools if not tool.strict]
    grammars = CallGrammar(use.form, tools, special_id, by_name=by_name, free_tools=free_tools)
    if answer is None:
        if not strict:
            return use
        free = grammars.free(single=use.single)
        return replace(use, constraint=free, constraint_param="tools", leaves_text=True)
    if answer.kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"tools do not go with a grammar of the kind {answer.kind}: no tool could be called.",
            param="tools", hint="use a JSON schema, or tool_choice none.",
        )  # fmt: skip
    schema = answer.text if answer.kind == "json_schema" else '{"type": "object"}'
    formed = grammars.formed(schema, single=use.single)
    return replace(use, constraint=formed, constraint_param="tools" if strict else None)


def _description(body: ChatRequest) -> str | None:
    """What the model is told of the answer's form: json_schema.description, which the API has for that."""
    form = body.response_format.json_schema if body.response_format is not None else None
    if form is None or not form.description:
        return None
    return f"Your answer has the form {form.name or 'answer'}: {form.description}"


def _checked(body: ChatRequest) -> list[FunctionTool]:
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; the limit is {MAX_TOOLS}.", param="tools")
    found: list[FunctionTool] = []
    for i, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise RequestError(f"tools[{i}] must be of type function, with a field of that name.", param="tools")
        refuse(tool, TOOL, param="tools", path=f"tools[{i}].")
        refuse(tool.function, TOOL, param="tools", path=f"tools[{i}].function.")
        if len(tool.function.name) > MAX_NAME:
            raise RequestError(f"tools[{i}].function.name has more than {MAX_NAME} characters.", param="tools")
        if not tool.function.name or any(tool.function.name == other.name for other in found):
            raise RequestError(f"tools[{i}].function.name is empty or given twice.", param="tools")
        strict = tool.strict if tool.function.strict is None else tool.function.strict
        found.append(FunctionTool(tool.function.name, tool.function.description, tool.function.parameters, strict))
    num_bytes = len(msgspec.json.encode(found))
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestError(f"tools has {num_bytes} bytes; the limit is {MAX_TOOLS_BYTES}.", param="tools")
    return found


def _check_writable(tools: Sequence[FunctionTool], form: CallFormat | None, by_name: bool) -> None:
    """Raise RequestError for names that this model's way of writing calls has no room for.

    Where calls are JSON, every name has room.
    """
    for i, tool in enumerate(tools):
        where = f"tools[{i}].function"
        if form is MISTRAL and by_name:
            name = tool.name
            if name != name.strip() or name.startswith("[") or any(mark in name for mark in ("{", ARGS, CALL_ID)):
                raise _unwritable(
                    f"{where}.name", name, "NAME[ARGS]{…}", f"begins with [ or holds {{, {ARGS} or {CALL_ID}"
                )
        elif form is TAGGED:
            names = [(f"{where}.name", tool.name, "<function=NAME>")]
            properties = (tool.parameters or {}).get("properties")
            for key in properties if isinstance(properties, dict) else ():
                names.append((f"{where}.parameters.properties", key, "<parameter=NAME>"))
            for place, name, way in names:
                if name != name.strip() or ">" in name:
                    raise _unwritable(place, name, way, "holds >")


def _unwritable(place: str, name: str, way: str, what: str) -> RequestError:
    return RequestError(
        f"{place}: this model has no way to write {name!r:.80}. It writes {way}; a name that {what}, or begins or ends "
        "with a space, would be read as another one.",
        param="tools", hint="use letters, digits, _ and -, which every model can write.",
    )  # fmt: skip


def _forced(choice: object, tools: Sequence[FunctionTool]) -> list[FunctionTool]:
    """The tools of which one must be called; none: the model may do as it likes."""
    if choice in (None, "auto"):
        return []
    if choice == "required":
        return list(tools)
    assert isinstance(choice, NamedToolChoice)
    if choice.type != "function" or choice.function is None:
        raise RequestError(
            f"tool_choice is of type {choice.type!r:.80}; it must be function, and name one.",
            param="tool_choice", code="unsupported_value",
        )  # fmt: skip
    name = choice.function.name
    wanted = [tool for tool in tools if tool.name == name]
    if not wanted:
        raise RequestError(f"tool_choice names {name!r}, which is not among tools.", param="tool_choice")
    return wanted


def _described(tool: FunctionTool) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(tool).items() if value is not None and key != "strict"}
