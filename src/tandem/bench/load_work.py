"""What a load test asks and when: bodies from random words or from a file, and arrivals over time. It sends nothing.

Everything is drawn from ``random.Random(seed)``: the same seed gives the same requests at the same moments.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.errors import SettingError, TandemError

TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years where much your way down
should because long each just state those people too how little good world make very year still see work own
"""
WORDS = tuple(TEXT.split())
"""Common English words: nearly every tokenizer has each as one token, so lengths come out about right for any model."""
CHARACTERS_A_TOKEN = 4
KINDS = ("poisson", "bursty", "closed")


class Ask:
    """One request: its body without stream options, for the endpoint that ``path`` names."""

    __slots__ = ("body", "path")

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path, self.body = path, body


def arrivals(kind: str, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Moments in seconds from the start, for ever. Gaps are gamma-distributed with mean 1/rate.

    burstiness  the gamma's shape for "bursty": 1 is Poisson, less is burstier (a gap's variance is 1/(shape·rate²)).
    """
    draw, now_s = random.Random(seed), 0.0
    shape = burstiness if kind == "bursty" else 1.0
    while True:
        yield now_s
        now_s += draw.gammavariate(shape, 1.0 / (rate * shape))


def random_asks(
    count: int, chat: bool, prompt: tuple[int, int], new: tuple[int, int], seed: int,
    ids: tuple[int, int] | None = None, extra: dict[str, Any] | None = None,
) -> list[Ask]:  # fmt: skip
    """Prompts of random words, or of random token ids within ids (completions only), and answers of random lengths."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        length, wanted = draw.randint(*prompt), draw.randint(*new)
        tokens: Any = None
        if ids is not None:
            if chat:
                raise SettingError("token ids need --endpoint completions.")
            tokens = [draw.randint(*ids) for _ in range(length)]
        text = " ".join(draw.choice(WORDS) for _ in range(length)) if tokens is None else ""
        found.append(_ask(chat, tokens or text, wanted, extra or {}))
    return found


def _ask(chat: bool, prompt: Any, wanted: int | None, extra: dict[str, Any]) -> Ask:
    limit = {} if wanted is None else {"max_tokens": wanted}
    if chat:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return Ask("/v1/chat/completions", {"messages": messages, **limit, **extra})
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    return Ask("/v1/completions", {"prompt": prompt, **limit, **extra})


def file_asks(
    path: str, count: int, chat: bool, new: tuple[int, int] | None, seed: int, extra: dict[str, Any] | None = None
) -> list[Ask]:
    """Requests from a file, shuffled, begun anew when it ends.

    JSON: a list of conversations as in ShareGPT ({"conversations": [{"from", "value"}, …]}): the first turn is the
    prompt, and the second gives the answer's length, about a token every 4 characters. JSONL: {"prompt"} or
    {"messages"}, with max_tokens or output_tokens if there is one, or a line of an OpenAI batch file ({"body"}).
    new: lengths to draw instead. Raises TandemError for a file that is none of these.
    """
    draw = random.Random(seed)
    entries = [entry for entry in map(_entry, _read(path)) if entry is not None]
    if not entries:
        raise TandemError(f"{path} holds no request that could be sent.", hint="see tandem bench serve --help.")
    draw.shuffle(entries)
    found = []
    for i in range(count):
        prompt, wanted = entries[i % len(entries)]
        found.append(_ask(chat, prompt, draw.randint(*new) if new is not None else wanted, extra or {}))
    return found


def _read(path: str) -> list[Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TandemError(f"{path} cannot be read: {error}.") from error
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except ValueError:
        pass
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise TandemError(f"{path}, line {number}: {error}.", hint="each line must be JSON.") from error
    return found


def _entry(item: Any) -> tuple[Any, int | None] | None:
    """(prompt or messages, length of the answer if known), or None for what holds no prompt."""
    if not isinstance(item, dict):
        return None
    item = item["body"] if isinstance(item.get("body"), dict) else item
    turns = item.get("conversations") or item.get("conversation")
    if isinstance(turns, list):
        values = [turn.get("value") or turn.get("content") for turn in turns if isinstance(turn, dict)]
        if not values or not isinstance(values[0], str) or not values[0]:
            return None
        answer = values[1] if len(values) > 1 and isinstance(values[1], str) else ""
        return values[0], max(1, len(answer) // CHARACTERS_A_TOKEN) if answer else None
    wanted = item.get("max_tokens") or item.get("max_completion_tokens") or item.get("output_tokens")
    prompt = item.get("messages") or item.get("prompt")
    if not isinstance(prompt, str | list) or not prompt:
        return None
    return prompt, wanted if isinstance(wanted, int) and wanted > 0 else None
