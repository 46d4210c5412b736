"""Serve a model over HTTP with the OpenAI API.

It knows options and the terminal; it does not know routes. The engine runs in a process of its own. The log goes to
stderr and never holds prompts, answers or keys.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from typing import Any

from tandem.cli.options import add_settings, metavar_of, option_name, settings_of
from tandem.config import Settings
from tandem.serve.guard import read_keys
from tandem.serve.options import ServeOptions

KEY_VARIABLE = "TANDEM_API_KEY"
EPILOG = f"""
environment:
  {KEY_VARIABLE}     an API key that clients must send; several are separated by commas

examples:
  tandem serve                                               the embedded model on http://127.0.0.1:8000
  tandem serve --model Qwen/Qwen3-0.6B --served-model-name small --port 9000
  tandem serve --host 0.0.0.0 --api-key-file keys.txt        open to the network, with API keys

signals:
  SIGTERM, SIGINT    take no more requests, finish what runs within --drain-timeout, then exit with status 0
  a second one       end what runs with an error, now
exit status: 0 after a stop by signal, 1 when the engine died or could not start, 2 for wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    groups: dict[str, Any] = {}
    for f in dataclasses.fields(ServeOptions):
        group = f.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(_option_of(f), **_declare(f))
    add_settings(parser)


def _option_of(f: "dataclasses.Field[Any]") -> str:
    return str(f.metadata.get("option") or option_name(f.name))


def _declare(f: "dataclasses.Field[Any]") -> dict[str, Any]:
    """argparse's words for one option of ServeOptions. What the user does not give is left out of the result."""
    text = str(f.metadata["help"]).replace("%", "%%")
    declared: dict[str, Any] = {"dest": f"serve_{f.name}", "default": argparse.SUPPRESS}
    kind = str(getattr(f.type, "__name__", f.type)).split(" ")[0]
    if kind.startswith("tuple"):
        declared |= {"action": "append", "metavar": metavar_of(f.metadata, "str")}
    elif kind == "bool":
        declared["action"] = argparse.BooleanOptionalAction
    else:
        declared["type"] = str if f.metadata.get("unit") == "bytes" else {"str": str, "int": int, "float": float}[kind]
        declared["metavar"] = metavar_of(f.metadata, kind)
    if f.default not in (None, ()) and f.default is not dataclasses.MISSING:
        shown = {True: "on", False: "off"}.get(f.default, f.default) if isinstance(f.default, bool) else f.default
        text = f"{text} (default: {shown})"
    return declared | {"help": text}


def main(arguments: argparse.Namespace) -> int:
    from tandem.serve.server import serve

    given = {name.removeprefix("serve_"): v for name, v in vars(arguments).items() if name.startswith("serve_")}
    options = ServeOptions.from_dict(given)
    keys = read_keys(os.environ.get(KEY_VARIABLE, "").split(","), options.api_key_file)
    settings = Settings.from_dict(settings_of(arguments))
    logging.getLogger("tandem").setLevel(logging.INFO)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(settings, options, keys=keys, say=_say))


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk behind the log keeps nobody from being served
        print(line, file=sys.stderr, flush=True)


def _loop_factory() -> Any:
    """uvloop's maker of event loops."""
    import uvloop

    return uvloop.new_event_loop
