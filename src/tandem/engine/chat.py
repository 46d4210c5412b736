"""Chat messages to prompt text, through the model's own template. It knows neither token ids nor HTTP.

The environment is the one that templates on the Hugging Face hub are written for: sandboxed and immutable, block lines
trimmed, loop controls, ``tojson`` without escapes, ``raise_exception``, ``strftime_now``, and ``{% generation %}``,
which only marks text and is ignored here. Each loop and macro of a template is given a clock tick at compile time, so
that no template renders longer than its limit.
"""

import difflib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.engine.earlier_calls import CallWay, handed_over, way_of
from tandem.engine.messages import checked_messages, final_text, json_of, with_written_calls
from tandem.errors import ModelError, RequestError
from tandem.values import checked_items, show

MAX_RENDER_S = 5.0
MAX_RENDER_CHARACTERS = 16 << 20
_MAX_RESULT = 1 << 20
_TICK = "tandem_tick_"
_OPTIONS = ("tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """A compiled chat template.

    source         the template's text.
    bos_token, eos_token   texts of these tokens, which templates write by name.
    Raises ModelError if the template has a syntax error.
    """

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            tree = environment.parse(source)
            _put_ticks(tree)
            tree.set_environment(environment)
            self._reserved = {*environment.globals, *self._tokens, *_OPTIONS[2:], "messages", "loop", "self"}
            self._template = environment.from_string(tree)
            self._names = {name for _, kind, name in environment.lex(source) if kind == "name"}
        except (TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise ModelError(
                f"the chat template has an error{f' in line {line}' if line else ''}: {error}.",
                hint="give a working template with --chat-template FILE.",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: Any,
    ) -> str:
        """The prompt text, as the model was trained to see it. It holds its own begin-of-sequence token, if any:
        encode it without special tokens.

        messages                as in the OpenAI API; text parts of a content are joined in order.
        add_generation_prompt   end with the header of an assistant's turn.
        continue_final_message  end inside the last message, so that the model goes on with it.
        values                  further variables of the template (documents, enable_thinking …), if it mentions them.
        Raises RequestError: as check_options, messages ill-formed, or the template refuses them (its own words).
        """
        self.check_options(
            tools, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, **values
        )
        plain = self._with_calls(checked_messages(messages, has_developer="developer" in self.source))
        marker = ""
        if continue_final_message:
            marker = f"tandem{secrets.token_hex(8)}"
            # The space behind the marker tells whether the template trims contents.
            plain[-1]["content"] = f"{final_text(plain)}{marker} "
        names = {
            "messages": plain,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._run({**self._tokens, "documents": None, **values, **names})
        return _cut_at(rendered, marker) if marker else rendered

    @cached_property
    def call_way(self) -> CallWay | None:
        """How it writes an assistant's tool calls, tried out; None: it leaves them out."""
        names = {**self._tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        return way_of(lambda talk: self._run({**names, "messages": talk}), mentions="tool_calls" in self.source)

    def _with_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same messages, calls and results as the template takes them, or within contents."""
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return messages
        if self.call_way is not None:
            return handed_over(messages, self.call_way)
        place = next((place for place, message in enumerate(messages) if message.get("tool_calls")), None)
        tells = "tools" in self.source
        if place is None and tells:
            return messages
        if place is not None and tells and "<tool_call>" not in self.source:
            raise RequestError(
                f"messages[{place}].tool_calls: this model's chat template tells of tools, but leaves earlier calls "
                "out.", param="messages", hint="write the calls into the content, as this model writes them.",
            )  # fmt: skip
        return with_written_calls(handed_over(messages, CallWay()))

    def check_options(
        self,
        tools: Any = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: Any,
    ) -> None:
        """Raise RequestError for options of ``render`` that no conversation could be rendered with.

        A value whose name the template never mentions is a slip, which would change nothing and go unseen; one with the
        name of a function or token of the template's own would change what the template means.
        """
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt), ("continue_final_message", continue_final_message),
        ):  # fmt: skip
            if not isinstance(flag, bool):
                raise RequestError(f"{name} is {show(flag)}; it must be True or False.", param=name)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message contradict each other: the prompt ends either with "
                "a new assistant turn or inside the last message.",
                param="continue_final_message",
            )
        if not all(isinstance(tool, Mapping) for tool in checked_items("tools", tools, "tools")):
            raise RequestError(f"tools is {show(tools)}; each tool must be an object.", param="tools")
        for name in values:
            if name in self._reserved or name.startswith(_TICK):
                raise RequestError(f"{name!r:.80} is the template's own and cannot be given.", param=name)
            if name not in self._names:
                near = difflib.get_close_matches(name, [*self._names, *_OPTIONS], n=1)
                raise RequestError(
                    f"the chat template knows no {name!r:.80}.",
                    param=name,
                    hint=f"did you mean {near[0]!r}?" if near else "it would change nothing; leave it out.",
                )

    def _run(self, names: dict[str, Any]) -> str:
        deadline_s = time.perf_counter() + MAX_RENDER_S

        def tick() -> None:
            if time.perf_counter() > deadline_s:
                raise RequestError(f"the chat template took longer than {MAX_RENDER_S:g} s.", param="messages")

        pieces, size = [], 0
        try:
            for piece in self._template.generate({**names, _TICK: tick}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDER_CHARACTERS:
                    raise RequestError(
                        f"the chat template wrote more than {MAX_RENDER_CHARACTERS} characters.", param="messages"
                    )
                tick()
        except RequestError:
            raise
        except SecurityError as error:
            raise RequestError(
                f"the chat template does what the sandbox forbids: {error}.", param="messages"
            ) from error
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # a template may fail in any way; it is this request's failure alone
            raise RequestError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return "".join(pieces)


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template. Raises RequestError if the model has none."""
    if template is None:
        raise RequestError(
            "this model has no chat template, so it takes no chat messages.",
            param="messages",
            hint="use /v1/completions with a plain prompt, or start with --chat-template FILE.",
        )
    return template


def _cut_at(rendered: str, marker: str) -> str:
    head, found, tail = rendered.rpartition(marker)
    if not found:
        raise RequestError(
            "the chat template leaves out the final message, which therefore cannot be continued.",
            param="continue_final_message",
        )
    return head if tail.startswith(" ") else head.rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with products bounded: ``"x" * 10**10`` is memory, not text."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = _power_size(left, right) if operator == "**" else _product_size(left, right)
        if size > _MAX_RESULT:
            raise SecurityError(f"the operation {operator!r} with operands that large")
        return super().call_binop(context, operator, left, right)


def _product_size(left: Any, right: Any) -> int:
    """Elements of a repeated sequence."""
    if hasattr(left, "__len__"):
        left, right = right, left
    return len(right) * max(left, 0) if isinstance(left, int) and hasattr(right, "__len__") else 0


def _power_size(base: Any, exponent: Any) -> int:
    """Bits of an integer power, about."""
    return base.bit_length() * max(exponent, 0) if isinstance(base, int) and isinstance(exponent, int) else 0


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _put_ticks(tree: nodes.Template) -> None:
    """Begin the body of each loop and macro with a call of the clock."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        # `if` rather than output: the call's result must not be written.
        node.body.insert(0, nodes.If(call, [], [], []).set_lineno(node.lineno))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json_of(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


_now: Callable[[str], str] = lambda layout: datetime.now().strftime(layout)  # noqa: E731  (a template's clock)
