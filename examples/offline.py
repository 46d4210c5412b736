"""Many prompts in, all answers out: python examples/offline.py [MODEL]. Without a model: the embedded SmolLM2."""

import sys

from tandem import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "Name three colours.", "Why is the sky blue?"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    results = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=48))
    for question, result in zip(QUESTIONS, results, strict=True):
        print(f"{question}\n    {result.completions[0].text}\n")
