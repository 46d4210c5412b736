"""Two answers at once, token by token: python examples/stream.py [MODEL]. The engine runs in a process of its own."""

import asyncio
import sys

from tandem import AsyncEngine, SamplingParams


async def answer(engine: AsyncEngine, question: str) -> str:
    prompt = await engine.encode_chat([{"role": "user", "content": question}])
    pieces = []
    async for update in await engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=48)):
        pieces.append(update.text)
        print(update.text, end="", flush=True)
    return "".join(pieces)


async def main(model: str | None) -> None:
    async with await AsyncEngine.start(model) as engine:
        questions = ("What is the capital of France?", "Name three colours.")
        answers = await asyncio.gather(*(answer(engine, question) for question in questions))
    for question, text in zip(questions, answers, strict=True):
        print(f"\n\n{question}\n    {text}", end="")
    print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
