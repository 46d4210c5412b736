"""Ask a model one thing, or chat with it.

It knows the terminal; it does not know how answers come about. Answers go to stdout as they come, everything else to
stderr. An engine runs on a thread of this process, so that Ctrl-C here ends an answer and not the engine.
"""

import argparse
import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Sequence
from typing import Any

from tandem.cli.options import EXIT_INTERRUPT, add_sampling, add_settings, sampling_of, settings_of
from tandem.cli.progress import waiting
from tandem.engine.blocking import BlockingEngine
from tandem.engine.contract import Update
from tandem.engine.streams import BlockingStream
from tandem.errors import ContextLengthError, EngineDeadError, RequestError, SettingError, TandemError
from tandem.request import SamplingParams

EPILOG = """
examples:
  tandem run "What is the capital of France?"
  tandem run                                           a chat; /reset forgets it, /exit or Ctrl-D leaves
  tandem run --temperature 0.7 --top-p 0.9 "Tell me a story"
  tandem run --raw "Once upon a time"                  no chat template: the model goes on with the text
  tandem run --model Qwen/Qwen3-0.6B "Hello"           a Hugging Face id, a folder or a .gguf file
  cat letter.txt | tandem run "Summarise:"             what is piped in stands behind the prompt
"""
CHAT_HELP = "type a message; /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"
UTF8_HINT = "convert it, as in: iconv -f latin1 -t utf-8 letter.txt | tandem run"
OWN_SETTINGS = {"max_num_seqs": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask; without it: a chat")
    parser.add_argument("--raw", action="store_true", help="no chat template: the model goes on with the prompt's text")
    parser.add_argument("--system", metavar="TEXT", help="a system message for the chat")
    parser.add_argument("-v", "--verbose", action="store_true", help="settings before, and figures behind the answer")
    add_sampling(parser)
    add_settings(parser, defaults=OWN_SETTINGS)


def main(arguments: argparse.Namespace) -> int:
    params = sampling_of(arguments)
    prompt = _prompt_of(arguments.prompt)
    if prompt is not None and not prompt:
        raise RequestError("the prompt is empty.", hint='give one, as in: tandem run "Hello"')
    with waiting() as screen:
        engine = BlockingEngine(on_phase=screen.phase, **settings_of(arguments, **OWN_SETTINGS))
    with engine:
        if arguments.verbose:
            print("\n".join(engine.card.lines), file=sys.stderr)
        talk = Talk(engine, params, raw=arguments.raw, system=arguments.system, verbose=arguments.verbose)
        if prompt is None:
            if talk.lowered:
                print(f"note: {talk.lowered}", file=sys.stderr)
            return chat(talk)
        talk.answer(prompt)
        return EXIT_INTERRUPT if talk.interrupted else 0


def _prompt_of(prompt: str | None) -> str | None:
    """The prompt, with what is piped in behind it; None: a chat. Raises RequestError if it is not UTF-8."""
    try:
        (prompt or "").encode()  # words that are not UTF-8 come in as lone surrogates
    except UnicodeEncodeError as error:
        raise RequestError("the prompt is not UTF-8.", hint=UTF8_HINT) from error
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        piped = sys.stdin.read().strip("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the input is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}.", hint=UTF8_HINT
        ) from error
    return "\n".join(part for part in (prompt, piped) if part) if prompt or piped else prompt or ""


class Talk:
    """A conversation with one engine."""

    def __init__(
        self, engine: BlockingEngine, params: SamplingParams, *, raw: bool = False, system: str | None = None,
        verbose: bool = False,
    ) -> None:  # fmt: skip
        self._engine, self._params, self._verbose = engine, params, verbose
        self.raw = raw or engine.card.chat_template is None
        if self.raw and system is not None:
            raise SettingError("a system message needs a chat template.", hint="leave out --system, or --raw.")
        self.lowered = _lowered_context(engine)
        self._begin = [{"role": "system", "content": system}] if system is not None else []
        self._messages: list[dict[str, str]] = list(self._begin)
        self.interrupted = False

    def reset(self) -> None:
        self._messages = list(self._begin)

    def answer(self, text: str) -> str:
        """Stream the answer to stdout and remember it. Ctrl-C ends it; what was said until then stays.

        Raises TandemError; the conversation is then as before.
        """
        self._messages.append({"role": "user", "content": text})
        try:
            prompt: str | Sequence[int] = text if self.raw else self._engine.encode_chat(self._messages)
            stream = self._engine.submit(prompt, self._fit(prompt))
            said = self._print(stream)
        except BaseException as error:
            long = len(self._messages) > 1
            self._messages.pop()
            if isinstance(error, ContextLengthError):
                raise self._too_long(error, long) from error
            raise
        self._messages.append({"role": "assistant", "content": said})
        return said

    def _fit(self, prompt: str | Sequence[int]) -> SamplingParams:
        """max_tokens as asked, or what the context leaves."""
        if isinstance(prompt, str) or self._params.max_tokens is None:
            return self._params
        room = self._engine.card.max_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the conversation has {len(prompt)} tokens; the limit is {self._engine.card.max_length}."
            )
        return dataclasses.replace(self._params, max_tokens=min(room, self._params.max_tokens))

    def _too_long(self, error: ContextLengthError, long: bool) -> ContextLengthError:
        hint = "shorten the message, or begin a new conversation with /reset." if long else "shorten the prompt."
        return ContextLengthError(error.what, hint=f"{hint} {self.lowered}".rstrip())

    def _print(self, stream: BlockingStream) -> str:
        clock = _Clock(len(stream.prompt_token_ids))
        said: list[str] = []
        self.interrupted = False
        while True:
            try:
                update: Update = next(stream)
                clock.count(update)
                said.append(update.text)
                sys.stdout.write(update.text)
                sys.stdout.flush()
            except StopIteration:
                break
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                stream.abort()
        if not said or not said[-1].endswith("\n"):
            print(flush=True)
        if self._verbose:
            print(clock.line(), file=sys.stderr)
        return "".join(said)


def _lowered_context(engine: BlockingEngine) -> str:
    """A sentence about a context that is shorter than the model's, because the KV cache is small; else nothing."""
    reason = str(engine.card.settings.get("reasons", {}).get("max_model_len", ""))
    if "KV cache" not in reason:
        return ""
    return f"The context is {engine.card.max_length} tokens, {reason}; --kv-cache-memory sets its size."


class _Clock:
    """Counts tokens over time, for the summary."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt, self.num_new = num_prompt, 0
        self.began_s = time.perf_counter()
        self.first_s = self.last_s = 0.0
        self.finish: Any = None

    def count(self, update: Update) -> None:
        if update.token_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.num_new += len(update.token_ids)
        self.finish = update.finish or self.finish

    def line(self) -> str:
        first_ms = (self.first_s - self.began_s) * 1e3
        rest_s = self.last_s - self.first_s
        speed = (self.num_new - 1) / rest_s if self.num_new > 1 and rest_s > 0 else 0.0
        return (
            f"prompt {self.num_prompt} tokens, first token after {first_ms:.0f} ms, "
            f"{self.num_new} tokens, {speed:.1f} tokens/s, finish: {self.finish}"
        )


def chat(talk: Talk) -> int:
    """Read messages from the terminal until /exit or Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    print(CHAT_HELP, file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except UnicodeDecodeError:
            print("error: the message is not UTF-8.", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            talk.reset()
            print("(forgotten)", file=sys.stderr)
        elif text in ("/help", "/?"):
            print(CHAT_HELP, file=sys.stderr)
        elif text.startswith("/") and " " not in text:
            print(f"there is no command {text}; {CHAT_HELP}", file=sys.stderr)
        elif text:
            _answer_or_explain(talk, text)


def _answer_or_explain(talk: Talk, text: str) -> None:
    """An error harms one message, not the chat."""
    try:
        talk.answer(text)
    except EngineDeadError:
        raise
    except TandemError as error:
        print(f"error: {error.what}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
