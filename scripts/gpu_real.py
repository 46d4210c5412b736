"""The embedded model's greedy tokens on a GPU in float32, beside those of the CPU.

    python3 scripts/gpu_real.py record tokens.json                  on any machine, on its CPU
    python3 scripts/gpu_real.py compare tokens.json [--model PATH]  on a machine with a GPU

Compares depths 1 to 3 with and without graphs, all prompts together and one by one. Exits with 1 if any token differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from tandem import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?", "Write a haiku about the sea.", "Explain photosynthesis to a child.",
    "List the first ten prime numbers.", "Translate 'good morning' into Spanish.", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "Who wrote Romeo and Juliet, and what is it about?",
)  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def tokens_of(settings: dict[str, Any], together: bool = True) -> list[list[int]]:
    """The answers' ids."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(dtype="float32", max_num_seqs=len(chats), max_model_len=512, **settings) as llm:
        results = llm.chat(chats, PARAMS) if together else [llm.chat(chat, PARAMS)[0] for chat in chats]
    return [list(result.completions[0].token_ids) for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("tokens", help="file of the CPU's tokens")
    parser.add_argument("--model", help="a .gguf file; without, the embedded model")
    asked = parser.parse_args()
    model = {"model": asked.model} if asked.model else {}
    if asked.what == "record":
        Path(asked.tokens).write_text(json.dumps(tokens_of({**model, "device": "cpu"})))
        return 0
    want, failed = json.loads(Path(asked.tokens).read_text()), False
    for depth in (1, 2, 3):
        for graphs in (True, False):
            found = tokens_of({**model, "device": "cuda", "depth": depth, "cuda_graphs": graphs}, together=depth != 3)
            equal = sum(map(list.__eq__, want, found))
            print(f"depth {depth}, graphs {graphs}, {'together' if depth != 3 else 'one by one'}: "
                  f"{equal} of {len(want)} answers equal, {sum(map(len, found))} tokens", flush=True)  # fmt: skip
            failed |= equal < len(want)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
