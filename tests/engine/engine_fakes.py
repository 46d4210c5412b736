"""A planner and a runner that do next to nothing, with failures on demand: what the loop's own tests need."""

import time
from collections import deque
from collections.abc import Callable

from tandem.engine.contract import Card, Mailbox
from tandem.engine.loop import Errand, Loop
from tandem.errors import CapacityError
from tandem.plan import Mask, Span, StepPlan, StepResult
from tandem.request import Change, Request
from tandem.runner.contract import RunnerFacts, Ticket

NUM_LOGITS = 300


def made_up(prompt: list[int], position: int) -> int:
    """The token number ``position`` of the answer to a prompt."""
    return (sum(prompt) * 31 + len(prompt) * 7 + position * 13) % 250 + 3


class FakePlanner:
    """Every live request gets a token a step; no blocks, no rows, no prefill."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[Request, int]] = {}
        self.owed: dict[str, int] = {}
        self.flight: deque[StepPlan] = deque()
        self.step = 0
        self.num_resets = 0
        self.fail_at: int | None = None

    def add(self, request: Request, mask: Mask | None = None) -> None:
        if request.prompt[0] == 1:
            raise CapacityError("it is larger than the whole pool of 0 blocks.")
        if request.prompt[0] == 2:
            raise ZeroDivisionError("a defect on the way in")
        self.live[request.id] = (request, 0)
        self.owed[request.id] = 0

    def abort(self, request: str) -> Change | None:
        self.owed.pop(request, None)
        return Change(request, finish="abort") if self.live.pop(request, None) else None

    def plan(self) -> StepPlan | None:
        spans = [
            Span(name, 0, done + self.owed[name], 1, (), True)
            for name, (request, done) in self.live.items()
            if done + self.owed[name] < (request.params.max_tokens or 16)
        ]
        if not spans:
            return None
        for span in spans:
            self.owed[span.request] += 1
        self.step += 1
        plan = StepPlan(self.step, spans)
        self.flight.append(plan)
        return plan

    def commit(self, result: StepResult) -> list[Change]:
        changes = []
        for span, token in zip(self.flight.popleft().spans, result.tokens, strict=True):
            if span.request not in self.live:
                continue
            request, done = self.live[span.request]
            assert span.start == done, "a token came out of order"
            self.owed[span.request] -= 1
            done += 1
            self.live[span.request] = (request, done)
            finish = "length" if done == (request.params.max_tokens or 16) else None
            if finish:
                del self.live[span.request], self.owed[span.request]
            changes.append(Change(span.request, [made_up(list(request.prompt), token)], finish))
        return changes

    @property
    def idle(self) -> bool:
        return not self.live and not self.flight

    def statistics(self) -> dict[str, int]:
        return {"running": len(self.live)}


class FakeRunner:
    """Hands back each span's position as its token, after ``step_s``."""

    def __init__(self, depth: int = 2, step_s: float = 0.0) -> None:
        self.depth, self.step_s = depth, step_s
        self.facts = RunnerFacts(64, 64, NUM_LOGITS, 4096)
        self.out: deque[StepPlan] = deque()
        self.most_out = 0
        self.collected = 0
        self.before_collect: Callable[[StepPlan], None] = lambda plan: None
        self.closed = False
        self.weights = "first"

    def submit(self, plan: StepPlan) -> Ticket:
        self.out.append(plan)
        self.most_out = max(self.most_out, len(self.out))
        assert len(self.out) <= self.depth
        return Ticket(plan.step, plan.step % self.depth)

    def collect(self, ticket: Ticket) -> StepResult:
        plan = self.out[0]
        assert plan.step == ticket.step
        self.before_collect(plan)
        self.out.popleft()
        if self.step_s:
            time.sleep(self.step_s)
        self.collected += 1
        return StepResult(plan.step, [span.start for span in plan.spans])

    def close(self) -> None:
        self.closed = True


def fake_card(**changes: object) -> Card:
    from tandem.engine.null_model import TEMPLATE, byte_tokenizer_json

    values = {
        "name": "fake", "tokenizer_json": byte_tokenizer_json(), "max_length": 4096, "num_logits": NUM_LOGITS,
        "num_blocks": 64, "block_size": 16, "eos_ids": (2,), "chat_template": TEMPLATE,
    }  # fmt: skip
    return Card(**{**values, **changes})  # type: ignore[arg-type]


def make_fake_loop(settings: dict, mailbox: Mailbox, on_phase: Callable[[str], None] = lambda text: None):
    """As build.make_loop. settings: step_s, depth, fail_at_step, hang_at_step, start: "error" | "defect"."""
    from tandem.errors import ModelError

    on_phase("pretending to load")
    if settings.get("start") == "error":
        raise ModelError("the model is not there.", hint="look elsewhere.")
    if settings.get("start") == "defect":
        raise KeyError("nobody foresaw this")
    runner = FakeRunner(settings.get("depth", 2), settings.get("step_s", 0.0))

    def before_collect(plan: StepPlan) -> None:
        if plan.step == settings.get("fail_at_step"):
            raise RuntimeError("the device is gone")
        if plan.step == settings.get("hang_at_step"):
            time.sleep(3600)

    runner.before_collect = before_collect

    def reload(source: str) -> None:
        if source == "bad":
            raise ModelError("the shapes differ.")
        runner.weights = source

    loop = Loop(FakePlanner(), runner, mailbox, errands={
        "reload": Errand(reload, drains=True), "weights": Errand(lambda _: runner.weights),
    })  # fmt: skip
    return loop, fake_card()


def make_null_loop(options: dict, mailbox: Mailbox, on_phase: Callable[[str], None] = lambda text: None):
    """As build.make_loop, with the scheduler and the checking null runner. options: depth, num_blocks, num_rows,
    step_time, script (text that every request says), raise_at, hang_at."""
    from tandem.engine.null_model import NUM_SPECIAL, byte_tokenizer_json
    from tandem.runner.null import Faults, NullRunner
    from tandem.schedule.scheduler import Scheduler

    num_blocks, num_rows, depth = options.get("num_blocks", 256), options.get("num_rows", 32), options.get("depth", 2)
    num_logits, script = 256 + NUM_SPECIAL, options.get("script")
    if script is not None:
        from tandem.engine.text import Text

        script = Text(byte_tokenizer_json()).encode(script)
    faults = Faults(raise_at=options.get("raise_at"), hang_at=options.get("hang_at"))
    runner = NullRunner(
        num_blocks, 16, num_rows, num_logits, 4096, depth=depth, script=script, faults=faults,
        step_time=options.get("step_time", 0.0), verify=options.get("verify", True),
    )  # fmt: skip
    planner = Scheduler(num_blocks, 16, num_rows, options.get("budget", 64), 4096)
    loop = Loop(planner, runner, mailbox, errands={"check": Errand(lambda _: planner.check(), drains=True)})
    return loop, fake_card(num_logits=num_logits, num_blocks=num_blocks)
