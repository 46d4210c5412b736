"""From settings to a loop: the one place that names concrete classes. It prints nothing.

settings ─locate─► model source ─► shape ─► facts ─resolve─► resolved ─► runner ─► scheduler ─► loop
"""

import dataclasses
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tandem.config import Resolved, Settings
from tandem.engine import sizing
from tandem.engine.admission import Errand
from tandem.engine.contract import Card, Mailbox
from tandem.engine.loop import Loop, snapshot
from tandem.engine.null_model import CONFIG, KV_ELEMENTS, TEMPLATE, byte_tokenizer_json
from tandem.engine.sizing import Shape
from tandem.errors import DownloadError, ModelError, RequestError, SettingError, TandemError
from tandem.observe.metrics import Metrics
from tandem.observe.plain import plain_metrics, plain_steps
from tandem.observe.requests import RequestLedger
from tandem.observe.timeline import Timeline
from tandem.observe.trace_file import events
from tandem.observer import Observer
from tandem.request import Request
from tandem.runner.contract import Runner, RunnerFacts
from tandem.sampling.grammar import GrammarLimits, compile_later
from tandem.schedule.scheduler import Scheduler
from tandem.weights.pull import pull as pull  # for the command line, which may not reach into weights
from tandem.weights.source import ModelSource, locate

OnPhase = Callable[[str], None]
ANY_BYTES = 1 << 50  # of memory: kernels do not depend on how much there is
RUNNERS = {"cpu": ("tandem.runner.cpu", "CpuRunner"), "cuda": ("tandem.runner.cuda", "CudaRunner")}


@dataclasses.dataclass(slots=True)
class Built:
    """Everything that a loop is made of, for those who want to make one of their own (benchmarks).

    spec   models.spec.ModelSpec; None on the null device.
    """

    source: ModelSource
    spec: Any
    shape: Shape
    resolved: Resolved
    runner: Runner
    phases_s: dict[str, float]

    def scheduler(self) -> Scheduler:
        """A fresh planner for this runner."""
        settings = self.resolved.settings
        return Scheduler(
            self.runner.facts.num_blocks,
            settings.block_size,
            settings.max_num_seqs or 1,
            settings.max_batch_tokens or 1,
            settings.max_model_len or 1,
            policy=settings.policy,
            prefix_cache=settings.prefix_cache,
            max_waiting=settings.max_waiting,
            target_step_s=(settings.target_step_ms or 0.0) / 1000,
        )

    def compile_mask(self, request: Request) -> "Future[Any]":
        """The Mask of a request's grammar, soon; returns at once. Both raise RequestError. Cancel it to leave."""
        constraint, tokenizer_json = request.params.constraint, self.source.tokenizer_json
        assert constraint is not None
        if tokenizer_json is None:
            raise RequestError("structured output needs a tokenizer; this model has none.", param="response_format")
        num_logits, eos_ids = self.runner.facts.num_logits, self.source.eos_ids
        limits = GrammarLimits(max_line=self.resolved.settings.max_new_grammars)
        return compile_later(constraint, tokenizer_json, num_logits, eos_ids, limits, request.client)

    def lines(self) -> list[str]:
        """The start banner."""
        phases = ", ".join(f"{name.removeprefix('runner: ')} {seconds:.2f}" for name, seconds in self.phases_s.items())
        banner = sizing.banner(self.source.name, self.resolved, self.shape, self.runner.facts)
        return [*banner, f"{'start-up, s':<24} {phases}"]

    def card(self) -> Card:
        source, settings, facts = self.source, self.resolved.settings, self.runner.facts
        known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
        recommended = source.generation_defaults
        return Card(
            name=source.name,
            tokenizer_json=source.tokenizer_json,
            max_length=settings.max_model_len or 1,
            num_logits=facts.num_logits,
            num_blocks=facts.num_blocks,
            block_size=settings.block_size,
            seed=settings.seed,
            eos_ids=source.eos_ids,
            bos_id=source.bos_id,
            bos_token=source.bos_token,
            eos_token=source.eos_token,
            add_bos=source.add_bos,
            chat_template=source.chat_template,
            defaults={name: value for name, value in recommended.items() if name in known and value is not None},
            settings=self.resolved.as_dict(),
            lines=tuple(self.lines()),
            phases_s=dict(self.phases_s),
        )


def make_loop(
    settings: Settings | Mapping[str, Any], mailbox: Mailbox, on_phase: OnPhase = lambda text: None,
    observers: Sequence[Observer] = (), offline: bool = False,
) -> tuple[Loop, Card]:  # fmt: skip
    """Build everything behind the border, and the card for those before it. Raises as ``build`` does.

    on_phase    told what is going on, one line at a time.
    observers   hung on the loop beside the engine's own.
    """
    built = build(settings, on_phase, offline)
    planner = built.scheduler()
    metrics, timeline, ledger = Metrics(), Timeline(built.resolved.settings.depth), RequestLedger()
    errands = {
        "reload": Errand(lambda model: _reload(built, planner, model), drains=True),
        "metrics": Errand(lambda _: plain_metrics(metrics)),
        "timeline": Errand(lambda _: timeline.numbers()),
        "trace": Errand(lambda _: events(timeline)),
        "steps": Errand(lambda wanted: plain_steps(timeline, wanted)),
        "state": Errand(lambda _: _state(planner, built.runner, ledger)),
        "account": Errand(lambda request: _account(ledger, request)),
        "check": Errand(lambda _: planner.check(), drains=True),
    }
    loop = Loop(
        planner, built.runner, mailbox, observers=[metrics, timeline, ledger, *observers],
        compile_mask=built.compile_mask, errands=errands,
    )  # fmt: skip
    return loop, built.card()


def build(
    settings: Settings | Mapping[str, Any], on_phase: OnPhase = lambda text: None, offline: bool = False
) -> Built:
    """Find the model, resolve the settings (see there for offline), load the weights, start the runner.

    Raises SettingError, ModelError, WeightsError, DownloadError or DeviceMemoryError, each with what to do.
    """
    if not isinstance(settings, Settings):
        settings = Settings.from_dict(dict(settings))
    phases_s: dict[str, float] = {}
    with _timed(phases_s, "locate"):
        source = _locate(settings, settings.device, on_phase)
        spec, shape = _shape(source, settings.device)
    with _compiling(settings, spec, shape, source) as compiling:
        with _timed(phases_s, "device"):
            device = settings.device or best_device()
            resolved = settings.resolve(sizing.device_facts(shape, device, settings), offline)
        if device != "cuda":  # there the runner measures what is free
            resolved = sizing.fit_cache(resolved, shape)
        on_phase(f"loading {source.name} on {device}")
        with _timed(phases_s, "runner"):
            runner = _runner(device, spec, shape, source, resolved, compiling)
    try:
        resolved = sizing.fit_length(resolved, runner.facts.num_blocks)
    except TandemError:
        runner.close()
        raise
    if device == "cuda" and resolved.reasons["kv_cache_memory"] != "asked":
        num_bytes = runner.facts.num_blocks * sizing.block_bytes_of(resolved.settings, shape)
        resolved = sizing.change(resolved, "kv_cache_memory", num_bytes, "measured: what the loaded model leaves free")
    phases_s |= {f"runner: {name}": seconds for name, seconds in runner.facts.phases_s.items()}
    return Built(source, spec, shape, resolved, runner, phases_s)


def describe(
    settings: Settings | Mapping[str, Any], on_phase: OnPhase = lambda text: None
) -> tuple[Resolved, list[str]]:
    """The settings as ``build`` would resolve them, and the start banner, without loading or fetching weights.

    On cuda the runner measures memory when it is built; until then the KV cache is an estimate.
    """
    if not isinstance(settings, Settings):
        settings = Settings.from_dict(dict(settings))
    device = settings.device or best_device()
    bare = dataclasses.replace(settings, load_format="random") if settings.load_format == "auto" else settings
    source = _locate(bare, device, on_phase)
    _, shape = _shape(source, device)
    resolved = sizing.fit_cache(settings.resolve(sizing.device_facts(shape, device, settings)), shape)
    num_blocks = (resolved.settings.kv_cache_memory or 0) // sizing.block_bytes_of(resolved.settings, shape)
    resolved = sizing.fit_length(resolved, num_blocks)
    chosen = resolved.settings
    facts = RunnerFacts(num_blocks, chosen.max_num_seqs or 1, shape.num_logits, chosen.max_model_len or 1)
    return resolved, sizing.banner(source.name, resolved, shape, facts)


def context_length(settings: Mapping[str, Any], on_phase: OnPhase = lambda text: None) -> int:
    """Positions of the model's context. Loads no weights. Raises as ``describe`` does."""
    asked = Settings.from_dict(dict(settings))
    return _shape(_locate(asked, asked.device, on_phase), asked.device)[1].max_length


def best_device() -> str:
    """cuda if there is one, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _compiling(settings: Settings, spec: Any, shape: Shape, source: ModelSource) -> Iterator[Any]:
    """Have kernels compiled by other processes, from before the device is opened until the runner stands.

    Gives a kernels.compiling.Compiling; None where no GPU is in sight.
    """
    found = None
    if settings.device in (None, "cuda"):
        import torch

        if torch.cuda.device_count():  # asks the driver's management library, which does not open the device
            from tandem.runner.variants import start_compiling

            with suppress(SettingError):  # told when the facts are known
                resolved = settings.resolve(sizing.facts_of(shape, "cuda", "", ANY_BYTES, settings.dtype))
                found = start_compiling(spec, resolved.settings, sizing.num_known_ids(source.tokenizer_json))
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _locate(settings: Settings, device: str | None, on_phase: OnPhase) -> ModelSource:
    if device == "null" and settings.model is None:
        source = ModelSource(
            name="null", kind="random", config=CONFIG, tokenizer_json=byte_tokenizer_json(), bos_id=1, eos_id=2,
            bos_token="<bos>", eos_token="<eos>", eos_ids=(2,), chat_template=TEMPLATE,
        )  # fmt: skip
    else:
        source = _find(settings, settings.model, on_phase)
    if settings.chat_template is not None:
        path = Path(settings.chat_template).expanduser()
        try:
            source = dataclasses.replace(source, chat_template=path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"the chat template {path} cannot be read: {error}.") from error
    return source


def _find(settings: Settings, model: str | None, on_phase: OnPhase) -> ModelSource:
    from tandem.models.named import NAMES, hint_for, named_config

    word = model if model is not None and re.fullmatch(r"[\w.-]+", model) and not Path(model).exists() else None
    if (
        word
        and settings.load_format == "random"
        and word.lower() not in NAMES
        and not word.endswith((".json", ".gguf"))
    ):
        raise ModelError(f"there is no built-in shape {word!r}.", hint=hint_for(word))
    try:
        return locate(
            model, load_format=settings.load_format, tokenizer=settings.tokenizer, named_config=named_config,
            on_progress=_progress_lines(on_phase),
        )  # fmt: skip
    except DownloadError as error:
        if word is None:
            raise
        raise DownloadError(error.what, hint=f"{error.hint or ''} {hint_for(word)}") from error


def _progress_lines(on_phase: OnPhase) -> Callable[[int, int], None]:
    """A download as lines, one every few percent."""
    last = -1

    def progress(done: int, total: int) -> None:
        nonlocal last
        share = done * 20 // total if total else done >> 24
        if share != last:
            last = share
            on_phase(f"fetching: {done / 1e6:.0f} MB" + (f" of {total / 1e6:.0f} MB" if total else ""))

    return progress


def _shape(source: ModelSource, device: str | None) -> tuple[Any, Shape]:
    if device == "null":  # needs no torch, so no spec either
        config = source.config
        try:
            return None, Shape(config["vocab_size"], config["max_position_embeddings"], 0, KV_ELEMENTS)
        except KeyError as error:
            raise ModelError(f"the model's configuration has no {error}.") from error
    from tandem.models.registry import spec_from_config
    from tandem.models.stored import stored

    spec = spec_from_config(source.config)
    sizes = spec.num_logits, spec.max_length, spec.num_parameters, spec.kv_bytes_per_token(1)
    return spec, Shape(*sizes, spec.dtype, stored(spec))


def _runner(
    device: str, spec: Any, shape: Shape, source: ModelSource, resolved: Resolved, compiling: Any = None
) -> Runner:
    settings = resolved.settings
    if device == "null":
        from tandem.runner.null import NullRunner

        num_blocks = (settings.kv_cache_memory or 0) // sizing.block_bytes_of(settings, shape)
        return NullRunner(
            num_blocks, settings.block_size, settings.max_num_seqs or 1, shape.num_logits,
            settings.max_model_len or 1, depth=settings.depth,
        )  # fmt: skip
    module, name = RUNNERS[device]
    create = getattr(importlib.import_module(module), name).create
    more = {"compiling": compiling} if device == "cuda" else {}
    num_tokens = sizing.num_known_ids(source.tokenizer_json)
    runner: Runner = create(spec, source, resolved, num_tokens=num_tokens, **more)
    return runner


def _reload(built: Built, planner: Scheduler, model: str) -> None:
    """Put another model's weights into the running engine, which is idle now. A failure leaves the old ones."""
    settings = built.resolved.settings
    reload = getattr(built.runner, "reload", None)
    if reload is None:
        raise TandemError(f"the runner on {settings.device} cannot replace its weights.")
    source = _find(dataclasses.replace(settings, load_format="auto"), model or None, lambda text: None)
    spec, _ = _shape(source, settings.device or "cpu")
    if spec != built.spec:
        raise ModelError(
            f"{source.name} is of another shape than {built.source.name}; only weights of the same shape fit.",
            hint="start a new engine for another model.",
        )
    reload(source)
    planner.reset_prefix()


def _state(planner: Scheduler, runner: Runner, ledger: RequestLedger) -> dict[str, Any]:
    return {"planner": snapshot(planner), "runner": snapshot(runner), "queue_s": dict(ledger.queue_why_s)}


def _account(ledger: RequestLedger, request: str) -> dict[str, Any] | None:
    account = ledger.account(request)
    return None if account is None else account.as_dict()


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    phases_s[name] = time.perf_counter() - began_s
