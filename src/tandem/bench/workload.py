"""What a benchmark asks: token prompts with lengths and answers to generate. It does not know who will answer.

Everything comes from ``random.Random(seed)``, so that a workload is the same on every machine and for every engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.errors import SettingError

CHAT_TOPICS = (
    "the capital of France", "why the sky is blue", "how bread rises", "prime numbers", "the water cycle", "a good tea",
    "the moons of Jupiter", "binary search", "why leaves turn red", "a short poem about rain", "the speed of light",
    "how bees find flowers", "the Roman aqueducts", "what a compiler does", "the tides", "how to learn a language",
)  # fmt: skip
CHAT_FORMS = (
    "What can you tell me about {}?", "Explain {} to a child.", "Write two sentences about {}.", "List facts on {}."
)  # fmt: skip


class Asked(NamedTuple):
    """One request of a workload: token ids in, at most max_tokens out."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at once. ignore_eos: every answer has exactly its max_tokens."""

    name: str
    asked: tuple[Asked, ...]
    ignore_eos: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(a.prompt) for a in self.asked)

    @property
    def num_new_tokens(self) -> int:
        return sum(a.max_tokens for a in self.asked)

    @property
    def longest(self) -> int:
        """Positions that the longest request needs."""
        return max(len(a.prompt) + a.max_tokens for a in self.asked)

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "requests": len(self.asked),
            "prompt_tokens": self.num_prompt_tokens,
            "new_tokens": self.num_new_tokens,
            "ignore_eos": self.ignore_eos,
        }


def fixed(num_requests: int, prompt_length: int, max_tokens: int, num_logits: int, seed: int = 0) -> Workload:
    """Requests of equal lengths with random ids below num_logits."""
    draw = random.Random(seed)
    prompts = (tuple(draw.randrange(num_logits) for _ in range(prompt_length)) for _ in range(num_requests))
    asked = tuple(Asked(prompt, max_tokens) for prompt in prompts)
    return Workload(f"fixed {num_requests} x {prompt_length} -> {max_tokens}", asked)


def random_lengths(
    num_requests: int, prompt_lengths: tuple[int, int], new_lengths: tuple[int, int], num_logits: int, seed: int = 0
) -> Workload:
    """Lengths drawn evenly from inclusive ranges: all prompts, ids of 0..10000 included, then all answers' lengths.

    With seed 0 and 256 requests of 100..1024 in and out this is the small throughput test that several projects
    use: 142,827 tokens in, 133,966 out.
    """
    draw = random.Random(seed)
    prompts = [
        tuple(draw.randint(0, 10000) % num_logits for _ in range(draw.randint(*prompt_lengths)))
        for _ in range(num_requests)
    ]
    asked = tuple(Asked(prompt, draw.randint(*new_lengths)) for prompt in prompts)
    ranges = "-".join(map(str, prompt_lengths)), "-".join(map(str, new_lengths))
    return Workload(f"random {num_requests} x {ranges[0]} -> {ranges[1]}", asked)


def chat_messages(num_requests: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Short one-turn conversations, no two alike until topics and forms run out."""
    pairs = [(topic, form) for form in CHAT_FORMS for topic in CHAT_TOPICS]
    random.Random(seed).shuffle(pairs)
    texts = [pairs[i % len(pairs)][1].format(pairs[i % len(pairs)][0]) for i in range(num_requests)]
    return [[{"role": "user", "content": text}] for text in texts]


def chat(prompts: Sequence[Sequence[int]], max_tokens: int) -> Workload:
    """Real prompts, already encoded, that may end by themselves."""
    asked = tuple(Asked(tuple(prompt), max_tokens) for prompt in prompts)
    return Workload(f"chat {len(asked)} -> {max_tokens}", asked, ignore_eos=False)


def parse_range(text: str) -> tuple[int, int]:
    """'64' → (64, 64), '100-1024' → (100, 1024). Raises SettingError."""
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise SettingError(f"{text!r} is no length.", hint="write a number, as 64, or a range, as 100-1024.")
    return found
