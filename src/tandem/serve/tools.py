"""What a chat request's tools mean here: what the template is told, what the grammar forces, how answers are parsed.

Families write calls differently; which way a model writes is read off its own template. A model whose template knows
no tools is told of them in a system message, in the Hermes format, which most later families follow.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.errors import RequestError
from tandem.request import Constraint
from tandem.serve.calls import HERMES, LLAMA, MISTRAL, CallFormat, Calls
from tandem.serve.parse import THINK_OPEN, AnswerParser, Reasoning
from tandem.serve.schema import ChatRequest, FunctionTool, NamedToolChoice

MAX_TOOLS = 128
INSTRUCTION = (
    "You can call these functions, described as JSON schemas:\n{tools}\n"
    'To call one, write nothing but <tool_call>{{"name": NAME, "arguments": ARGUMENTS}}</tool_call>.'
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. for_template: what the template gets; instruction: a system message instead."""

    for_template: list[dict[str, Any]] | None = None
    instruction: str | None = None
    constraint: Constraint | None = None
    form: CallFormat | None = None
    names: tuple[str, ...] = ()
    single: bool = False

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation, with the instruction joined to its system message if there is one."""
        if self.instruction is None:
            return list(messages)
        first = messages[0] if messages else {}
        if isinstance(first, dict) and first.get("role") == "system" and isinstance(first.get("content"), str):
            return [{**first, "content": f"{first['content']}\n\n{self.instruction}"}, *messages[1:]]
        return [{"role": "system", "content": self.instruction}, *messages]

    def parser(
        self, template: str | None, prompt_end: str, *, constrained: bool = False
    ) -> Callable[[], AnswerParser] | None:
        """Makes a parser for each answer; None if the text needs none.

        prompt_end    the prompt's last characters.
        constrained   a grammar governs the answer from its first token on: there is no room for thoughts.
        """
        thinks = THINK_OPEN in (template or "") and not constrained
        inside = thinks and prompt_end.rstrip().endswith(THINK_OPEN)
        if not thinks and self.form is None:
            return None

        def make() -> AnswerParser:
            calls = Calls(self.form, self.names, single=self.single) if self.form is not None else None
            if not thinks:
                assert calls is not None
                return calls
            return Reasoning(calls, inside=inside)

        return make


def format_of(template: str | None) -> CallFormat | None:
    """How the model writes tool calls, by its template; None: the template knows no tools."""
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return HERMES if "<tool_call>" in template else LLAMA


def tool_use(body: ChatRequest, template: str | None) -> ToolUse:
    """Check tools and tool_choice. Raises RequestError naming the field."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a tool, but tools is empty.", param="tool_choice")
        return ToolUse()
    tools = _checked(body)
    if choice == "none":
        return ToolUse()
    forced = _forced(choice, tools)
    form = format_of(template)
    plain = [{"type": "function", "function": _described(tool)} for tool in tools]
    return ToolUse(
        for_template=plain if form is not None else None,
        instruction=None if form is not None else INSTRUCTION.format(tools=json.dumps(plain)),
        constraint=_constraint(forced, form or HERMES) if forced else None,
        form=form or HERMES,
        names=tuple(tool.name for tool in tools),
        single=body.parallel_tool_calls is False,
    )


def _checked(body: ChatRequest) -> list[FunctionTool]:
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; the limit is {MAX_TOOLS}.", param="tools")
    found: list[FunctionTool] = []
    for i, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise RequestError(f"tools[{i}] must be of type function, with a field of that name.", param="tools")
        if not tool.function.name or any(tool.function.name == other.name for other in found):
            raise RequestError(f"tools[{i}].function.name is empty or given twice.", param="tools")
        found.append(tool.function)
    return found


def _forced(choice: object, tools: Sequence[FunctionTool]) -> list[FunctionTool]:
    """The tools of which one must be called; none: the model may do as it likes."""
    if choice in (None, "auto"):
        return []
    if choice == "required":
        return list(tools)
    assert isinstance(choice, NamedToolChoice)
    name = choice.function.name if choice.function is not None else None
    wanted = [tool for tool in tools if tool.name == name]
    if choice.type != "function" or not wanted:
        raise RequestError(f"tool_choice names {name!r}, which is not among tools.", param="tool_choice")
    return wanted


def _described(tool: FunctionTool) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(tool).items() if value is not None and key != "strict"}


def _constraint(tools: Sequence[FunctionTool], form: CallFormat) -> Constraint:
    """A grammar (llguidance's Lark dialect) of exactly one call to one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, form.arguments_key: tool.parameters or {"type": "object"}},
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    before, after = form.opening + ("[" if form.is_list else ""), ("]" if form.is_list else "") + form.closing
    parts = [json.dumps(before)] * bool(before) + ["call"] + [json.dumps(after)] * bool(after)
    return Constraint("grammar", f"start: {' '.join(parts)}\ncall: %json {schema}\n")
