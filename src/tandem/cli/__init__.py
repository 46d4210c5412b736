"""The command ``tandem``: one word a command. It knows which commands there are, not what they do.

A command is a module with ``add_arguments(parser)`` and ``main(arguments) -> exit status``; its docstring's first
line is the help, EPILOG holds examples. Only the chosen command's module is loaded.
"""

import contextlib
import errno
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from tandem import __version__
from tandem.cli.options import EXIT_ERROR, EXIT_INTERRUPT, EXIT_USAGE, Parser
from tandem.errors import CapacityError, ContextLengthError, RequestError, SettingError, TandemError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("tandem.cli.run", "ask a model, or chat with it"),
    "serve": ("tandem.cli.serve", "serve a model over HTTP with the OpenAI API"),
    "batch": ("tandem.cli.batch", "answer a file of requests in the OpenAI batch format"),
    "explain": ("tandem.cli.explain", "show where the time of a request to a server went"),
    "pull": ("tandem.cli.pull", "fetch a model into the cache"),
    "bench": ("tandem.cli.bench", "measure: offline, serve, host, decode, seed"),
    "trace": ("tandem.cli.trace", "record host and device over time: a picture, a trace file and figures"),
    "info": ("tandem.cli.info", "show version, machine and the settings in force for a model"),
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXAMPLES = """
examples:
  tandem run "What is the capital of France?"      one answer, from the small model that comes with tandem
  tandem run                                       a chat
  tandem run --model Qwen/Qwen3-0.6B "Hello"       any Hugging Face id, folder or .gguf file
  tandem serve                                     an OpenAI-compatible server on http://127.0.0.1:8000
  tandem COMMAND --help                            what a command can do
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 for an error, 2 for wrong usage, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    _log_plainly()
    try:
        status = dispatch("tandem", COMMANDS, words, EXAMPLES)
        if sys.stdout is not None:
            sys.stdout.flush()  # here its failure can still be told
        return status
    except TandemError as error:
        return _explain(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except Exception as error:
        return _explain_unexpected(error)


def dispatch(program: str, commands: Mapping[str, tuple[str, str]], words: Sequence[str], examples: str = "") -> int:
    """Load the module of the command that words begin with and run it."""
    width = max(map(len, commands)) + 2
    table = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in commands.items())
    parser = Parser(
        prog=program,
        usage=f"{program} COMMAND [options]",
        description=f"{DESCRIPTION}\n\ncommands:\n{table}" if program == "tandem" else f"commands:\n{table}",
        epilog=examples,
    )
    if program == "tandem":
        parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    if words[0].startswith("-"):
        parser.parse_args(words[:1])
    if words[0] not in commands:
        return _no_such_command(program, words[0], commands)
    name = words[0]
    module = importlib.import_module(commands[name][0])
    if hasattr(module, "COMMANDS"):
        return dispatch(f"{program} {name}", module.COMMANDS, words[1:], module.EPILOG)
    first_line = (module.__doc__ or "").partition("\n")[0]
    command = Parser(prog=f"{program} {name}", description=first_line, epilog=module.EPILOG)
    module.add_arguments(command)
    command.usage = " ".join([f"{program} {name} [options]", *(f"[{word}]" for word in command.positionals())])
    return int(module.main(command.parse_args(words[1:])))


DESCRIPTION = "tandem: an LLM inference engine in which host and device work in tandem."


def _no_such_command(program: str, word: str, commands: Mapping[str, tuple[str, str]]) -> int:
    import difflib

    print(f"error: there is no command {word!r}.", file=sys.stderr)
    near = difflib.get_close_matches(word, commands, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are: {', '.join(commands)}."
    if " " in word and program == "tandem":
        hint = f'to ask a question: tandem run "{word}"'
    print(f"hint: {hint}", file=sys.stderr)
    return EXIT_USAGE


def _explain(error: TandemError) -> int:
    if debugging():
        raise error
    print(f"error: {error.what}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    wrong_usage = isinstance(error, SettingError | RequestError)
    return EXIT_USAGE if wrong_usage and not isinstance(error, ContextLengthError | CapacityError) else EXIT_ERROR


def _explain_unexpected(error: Exception) -> int:
    """The system's errors with a file's name are the user's, and so is a full disk; all others are ours."""
    if debugging():
        raise error
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, OSError) and error.filename is not None:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return EXIT_ERROR
    if isinstance(error, OSError) and error.errno in FULL:
        with contextlib.suppress(OSError):  # what could not be written is not tried once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: the output cannot be written: {error.strerror}.", file=sys.stderr)
        return EXIT_ERROR
    print(f"internal error: {type(error).__name__}{': ' if reason else ''}{reason}", file=sys.stderr)
    print("hint: TANDEM_DEBUG=1 shows the traceback; please report it.", file=sys.stderr)
    return EXIT_ERROR


def debugging() -> bool:
    return os.environ.get("TANDEM_DEBUG", "") not in ("", "0")


class _PlainFormatter(logging.Formatter):
    """One line a message; tracebacks only when debugging."""

    def format(self, record: logging.LogRecord) -> str:
        if not debugging():
            record.exc_info = record.exc_text = None
        return super().format(record)


def _log_plainly() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debugging() else logging.WARNING, handlers=[handler])
