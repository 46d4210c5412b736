"""Grammars (llguidance's Lark dialect) of answers with tool calls. It does not know requests.

forced    one call and nothing else
free      text, in which an opening is followed by a call (strict tools: what a call's opening begins, its schema ends)
formed    calls, or an answer of a JSON schema
"""

import json
from collections.abc import Callable, Sequence

from tandem.request import Constraint
from tandem.serve.calls import ARGS, CallFormat
from tandem.serve.schema import FunctionTool

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
SpecialId = Callable[[str], int | None]


class CallGrammar:
    """Makes the grammars of one request.

    free_tools   names of tools whose arguments may be any object (under auto, those that are not strict).
    by_name      calls are written as name[ARGS]{…} (a family whose format is a list has both ways).
    special_id   the id of a special token by its text, None if it is no such token: a grammar names it by id.
    """

    def __init__(
        self, form: CallFormat, tools: Sequence[FunctionTool], special_id: SpecialId, *, by_name: bool = False,
        free_tools: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._form, self._special_id, self._by_name = form, special_id, by_name and form.is_list
        self._schemas = {
            tool.name: {"type": "object"} if tool.name in free_tools else tool.parameters or NO_ARGUMENTS
            for tool in tools
        }

    def forced(self) -> Constraint:
        """Exactly one call."""
        return self._constraint(f"start: {self._opening()} {self._body(1)}")

    def free(self, *, single: bool) -> Constraint:
        """Text with calls in it; each call is of one of the tools. single: one call at most."""
        form = self._form
        if not form.opening:  # the answer is calls, or does not begin as one
            return self._constraint(
                f"start: {self._body(1 if single else None)} | text",
                r"text: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/",
            )
        special = self._special_id(form.opening) is not None
        opened = f"TEXT {self._opening()}"
        rule = f"opened: {opened}" if special else f"opened[lazy]: {opened}"
        times = "?" if single else "*"
        body = self._body(1 if single else None)
        return self._constraint(f"start: (opened {body}){times} text", rule, "text: TEXT", r"TEXT: /(.|\n)*/")

    def formed(self, schema: str, *, single: bool) -> Constraint:
        """Calls alone, or an answer of a JSON schema."""
        opening, body = self._opening(), self._body(1 if single else None)
        calls = f"{opening} {body}" if single or not self._form.opening else f"({opening} {body} SPACE)+"
        return self._constraint(f"start: {calls} | answer", f"answer: %json {schema}")

    def _body(self, num_calls: int | None) -> str:
        """What follows an opening."""
        form = self._form
        if self._by_name:
            return "call"
        more = "" if num_calls == 1 else ", ?" if form.is_list else "; ?" if not form.opening else ""
        calls = f"call (/{more}/ call)*" if more else "call"
        if form.is_list:
            return f'SPACE "[" {calls} "]"'
        return f"SPACE {calls} SPACE {self._text(form.closing)}" if form.opening else calls

    def _opening(self) -> str:
        return self._text(self._form.opening)

    def _text(self, text: str) -> str:
        token = self._special_id(text) if text else None
        return f"<[{token}]>" if token is not None else json.dumps(text) if text else ""

    def _constraint(self, *rules: str) -> Constraint:
        """Each tool's schema is a document of its own, in which "#" is its root, as its client wrote it."""
        lines = [*rules, r"SPACE: /[ \n]?/", r"WS: /[ \t\r\n]*/"]
        lines.append("call: " + " | ".join(f"call_{place}" for place in range(len(self._schemas))))
        for place, (name, schema) in enumerate(self._schemas.items()):
            begin, end = self._around(name)
            lines.append(f"call_{place}: {begin} %json {json.dumps(schema)} {end}")
        return Constraint("grammar", "\n".join(lines) + "\n")

    def _around(self, name: str) -> tuple[str, str]:
        """What stands before a call's arguments and behind them."""
        if self._by_name:
            return f"{json.dumps(name)} {self._text(ARGS)}", ""
        parts = (json.dumps(part, ensure_ascii=False) for part in ("name", name, self._form.arguments_key))
        key, value, arguments = map(json.dumps, parts)
        return f'"{{" WS {key} WS ":" WS {value} WS "," WS {arguments} WS ":" WS', 'WS "}"'
