"""The same lengths through llama.cpp's own benchmark program. It knows the program's options and output.

``llama-batched-bench`` computes pl prompts of npp tokens and ntg tokens for each; its prompts are its own, so only the
speed can be compared, on the same GGUF file.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.errors import TandemError

LIMIT_S = 1800


class LlamaFigure(NamedTuple):
    """num_requests at once: seconds for prompts and for tokens, generated tokens a second of both together."""

    num_requests: int
    prompt_s: float
    decode_s: float
    tokens_per_s: float


def run_llama(
    program: str, model: Path, num_requests: Sequence[int], prompt_length: int, max_tokens: int, threads: int,
    repeats: int = 1,
) -> list[LlamaFigure]:  # fmt: skip
    """A figure a number of requests, the best of so many repeats.

    Raises TandemError if the program is missing, fails, or says something else than expected.
    """
    if model.suffix != ".gguf":
        raise TandemError(f"llama.cpp reads .gguf files; the model is {model}.")
    context = max(num_requests) * (prompt_length + max_tokens) + 64
    words = [
        program, "-m", str(model), "-c", str(context), "-b", "2048", "-ub", "512", "-npp", str(prompt_length),
        "-ntg", str(max_tokens), "-npl", ",".join(map(str, num_requests)), "-t", str(threads),
        "--output-format", "jsonl",
    ]  # fmt: skip
    best: dict[int, LlamaFigure] = {}
    for _ in range(repeats):
        for figure in parse_llama(_output_of(words)):
            if figure.num_requests not in best or figure.tokens_per_s > best[figure.num_requests].tokens_per_s:
                best[figure.num_requests] = figure
    return [best[count] for count in num_requests]


def _output_of(words: Sequence[str]) -> str:
    program = words[0]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError as error:
        raise TandemError(f"there is no program {program!r}.", hint="give it by --llama-batched-bench.") from error
    except subprocess.TimeoutExpired as error:
        raise TandemError(f"{program} took more than {LIMIT_S} s.") from error
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no output"])[-1]
        raise TandemError(f"{program} failed with exit status {found.returncode}: {last}")
    return found.stdout


def parse_llama(output: str) -> list[LlamaFigure]:
    """One figure a line of JSON: pl, tg, t_pp, t_tg."""
    figures = []
    for line in output.splitlines():
        if line.startswith("{"):
            values: dict[str, Any] = json.loads(line)
            total_s = values["t_pp"] + values["t_tg"]
            tokens = values["pl"] * values["tg"]
            figures.append(LlamaFigure(values["pl"], values["t_pp"], values["t_tg"], tokens / total_s))
    if not figures:
        raise TandemError("llama-batched-bench printed no figures.", hint="it must know --output-format jsonl.")
    return figures
