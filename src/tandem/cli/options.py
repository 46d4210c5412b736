"""Options of the command line, derived from Settings and SamplingParams. It knows no command."""

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tandem.config import AUTO, GROUPS, Settings
from tandem.request import SamplingParams

KINDS = {"str": str, "int": int, "float": float}
SAMPLING: tuple[tuple[str, type, Any, str], ...] = (
    ("--max-tokens", int, 512, "most tokens of an answer (default: 512)"),
    ("--temperature", float, 0.0, "0: always the likeliest token; 1: the model's own distribution (default: 0)"),
    ("--top-p", float, 1.0, "choose among the likeliest tokens that together reach this probability"),
    ("--top-k", int, 0, "choose among this many likeliest tokens (0: all)"),
    ("--min-p", float, 0.0, "drop tokens less likely than this share of the likeliest"),
    ("--repetition-penalty", float, 1.0, "above 1: tokens that occurred become less likely"),
    ("--sampling-seed", int, None, "the same seed gives the same answer"),
)
EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPT = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse with our ways: whole option names only, help as written, the nearest spelling for a wrong option."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def positionals(self) -> list[str]:
        """What may stand without an option's name, as the help shows it."""
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        if hint := self._hint(message):
            print(f"hint: {hint}", file=sys.stderr)
        print(f"hint: {self.prog} --help lists the options.", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def _hint(self, message: str) -> str | None:
        known = [option for action in self._actions for option in action.option_strings]
        if not message.startswith("unrecognized arguments:"):
            return None
        for word in message.split()[2:]:
            if word.startswith("-"):
                near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
                return f"did you mean {near[0]}?" if near else None
        return "put a prompt of several words into quotes."


def count(text: str) -> int:
    """argparse's type for numbers of things: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is given; it must be at least 1")
    return number


def metavar_of(metadata: Mapping[str, Any], kind: str) -> str:
    """What stands for the value in the help: the unit of a field (seconds, bytes, share, file, …), or else its type."""
    return str(metadata.get("unit") or {"str": "text", "int": "n", "float": "x"}[kind]).upper()


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_cacert(parser: Any) -> None:
    """An option of the commands that speak to a server. parser: or a group of one."""
    parser.add_argument(
        "--cacert", metavar="FILE", help="PEM file of the certificates to trust over https, instead of the system's"
    )


def add_settings(
    parser: argparse.ArgumentParser, *, without: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """An option for every setting, grouped. Only what the user gives is in the parsed result.

    without    settings that the command chooses itself.      defaults   what it uses in place of a setting's default.
    """
    groups = {name: parser.add_argument_group(f"settings: {name}") for name in GROUPS}
    for f in dataclasses.fields(Settings):
        if f.name not in without:
            default = (defaults or {}).get(f.name, f.default)
            groups[f.metadata["group"]].add_argument(option_name(f.name), **_declare(f, default))


def _declare(f: "dataclasses.Field[Any]", default: Any) -> dict[str, Any]:
    """argparse's words for one setting. Ranges are checked by Settings, which explains them."""
    metadata = f.metadata
    text = metadata["help"].replace("%", "%%")
    kind = str(getattr(f.type, "__name__", f.type)).split(" ")[0]
    declared: dict[str, Any] = {"dest": f"setting_{f.name}", "default": argparse.SUPPRESS}
    if kind == "bool":
        declared["action"] = argparse.BooleanOptionalAction
    elif metadata.get("choices"):
        choices = metadata["choices"] if f.default is not None else (AUTO, *metadata["choices"])
        declared |= {"choices": choices, "type": str}
    else:
        declared["type"] = str if metadata.get("unit") == "bytes" else KINDS[kind]
        if f.default is None:
            declared["type"] = OR_AUTO.get(declared["type"], declared["type"])
        declared["metavar"] = metavar_of(metadata, kind)
    if "default" not in text:
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        shown = "auto" if default is None else shown
        text = f"{text} (default: {shown})"
    return declared | {"help": text}


def integer_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


def number_or_auto(text: str) -> float | str:
    return text if text == AUTO else float(text)


integer_or_auto.__name__, number_or_auto.__name__ = "int", "float"  # as argparse names them in an error
OR_AUTO: dict[Any, Any] = {int: integer_or_auto, float: number_or_auto}


def settings_of(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The settings that the user gave, by name; more: the command's own, which the user's override."""
    given = {name.removeprefix("setting_"): v for name, v in vars(arguments).items() if name.startswith("setting_")}
    return {**more, **given}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Options for how an answer is chosen: greedy unless said."""
    group = parser.add_argument_group("the answer")
    for name, kind, default, text in SAMPLING:
        metavar = {int: "N", float: "X"}[kind]
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    text = "end the answer before this text; may be given again"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the model's own end")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Raises RequestError for a value out of range."""
    return SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.sampling_seed,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
