"""The same requests through transformers: its continuous batching and its padded static generate.

It knows transformers' calls; it does not know tandem's engine. Weights come from the same file or folder; a GGUF file
is dequantised by transformers itself, in the dtype asked for.
"""

import logging
import time
import warnings
from pathlib import Path
from typing import Any, cast

from tandem.bench.drive import Record, Run
from tandem.bench.workload import Workload
from tandem.errors import TandemError

PAGE, MOST_TOKENS = 256, 2048


class Transformers:
    """A model loaded by transformers. Raises TandemError if it is not installed or the weights cannot be read."""

    def __init__(self, path: Path, dtype: str) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise TandemError("transformers is not installed.", hint='pip install -e ".[test]"') from error
        _be_quiet()
        self._torch = torch
        folder, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, dtype), **options)
        except Exception as error:
            raise TandemError(f"transformers could not load {path}: {type(error).__name__}: {error}") from error
        self._model = model.to(device).eval()
        self._device = device
        if self._model.generation_config.pad_token_id is None:
            self._model.generation_config.pad_token_id = 0

    def continuous(self, workload: Workload) -> Run:
        """generate_batch, its manager kept from a warm-up of the same shape so that its set-up is not timed."""
        prompts = [list(asked.prompt) for asked in workload.asked]
        longest = max(asked.max_tokens for asked in workload.asked)
        config = self._generation(longest, workload.ignore_eos)
        options = {"generation_config": config, "continuous_batching_config": self._batching(workload)}
        warm = [[(token + 1) % 1000 for token in prompt] for prompt in prompts]
        self._model.destroy_cached_continuous_batching_manager()  # it is sized for the requests that it was made for
        self._model.generate_batch(warm, max_new_tokens=4, persistent_manager=True, **options)
        began_s = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts, max_new_tokens=longest, record_timestamps=True, persistent_manager=True, **options
        )
        wall_s = time.perf_counter() - began_s
        if len(outputs) != len(prompts) or any(output.error for output in outputs.values()):
            raise TandemError("transformers' continuous batching lost or failed requests.")
        records = []
        for output, asked in zip(outputs.values(), workload.asked, strict=True):
            record = Record(began_s)
            record.tokens = list(output.generated_tokens)[: asked.max_tokens]
            record.times_s = list(output.timestamps or ())[: asked.max_tokens]
            records.append(record)
        return Run("transformers continuous", wall_s, records)

    def static(self, workload: Workload) -> Run:
        """generate on one padded batch: padding on the left, as decoders need, until the slowest has finished."""
        torch = self._torch
        prompts = [list(asked.prompt) for asked in workload.asked]
        width = max(map(len, prompts))
        longest = max(asked.max_tokens for asked in workload.asked)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=mask, generation_config=self._generation(2, workload.ignore_eos))
            config = self._generation(longest, workload.ignore_eos)
            began_s = time.perf_counter()
            output = self._model.generate(ids, attention_mask=mask, generation_config=config)
            rows = output[:, width:].tolist()
        wall_s = time.perf_counter() - began_s
        records = []
        for row, asked in zip(rows, workload.asked, strict=True):
            record = Record(began_s)
            record.tokens = row[: asked.max_tokens]
            records.append(record)
        run = Run("transformers static", wall_s, records)
        computed = len(prompts) * (width + longest)
        run.padding_share = 1.0 - (workload.num_prompt_tokens + workload.num_new_tokens) / computed
        return run

    def _generation(self, max_new_tokens: int, ignore_eos: bool) -> Any:
        from transformers import GenerationConfig

        own, make = self._model.generation_config, cast(Any, GenerationConfig)
        return make(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=own.pad_token_id,
            eos_token_id=-1 if ignore_eos else own.eos_token_id,  # -1: an id that no token has
        )

    def _batching(self, workload: Workload) -> Any:
        """On a GPU transformers sizes itself. On a CPU it would fill most of the memory, so it gets what it needs."""
        from transformers import ContinuousBatchingConfig

        sizes: dict[str, int] = {}
        if self._device == "cpu":
            pages = sum(-(-(len(a.prompt) + a.max_tokens) // PAGE) for a in workload.asked)
            tokens = min(MOST_TOKENS, max(workload.num_prompt_tokens, len(workload.asked)))
            sizes = {"page_size": PAGE, "num_blocks": pages + 2, "max_batch_tokens": tokens}
        return cast(Any, ContinuousBatchingConfig)(allow_block_sharing=False, **sizes)


def _be_quiet() -> None:
    """transformers reports its start-up at length; the table should stand alone."""
    warnings.filterwarnings("ignore", module="transformers")
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    cast(Any, transformers_logging).disable_progress_bar()
