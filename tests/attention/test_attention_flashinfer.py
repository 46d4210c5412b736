"""FlashInfer as a backend: when it is taken, what it refuses, what its module is told; on a GPU, its results."""

import logging
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from test_attention_triton import DEVICE, assert_near, case, slow

from tandem.attention import flashinfer, flashinfer_module, triton
from tandem.attention.choice import attention_backend
from tandem.errors import SettingError
from tandem.kernels import attention_library as library
from tandem.kernels import launch

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
CPU = torch.device("cpu")
SHAPE = (4, 2, 64, 16, None, None)  # query heads, KV heads, head dimension, block size, window, softcap
MIXED = [(1, 20), (9, 9), (13, 41), (1, 1), (30, 77)]


class Module:
    """Computes what FlashInfer's module is documented to, from the arguments that it is called with."""

    def __init__(self):
        self.plans, self.runs = [], 0

    def plan(
        self, floats, ints, pinned, starts, tables, lengths, rows, size, heads, kv, page, graph, qk, vo, causal, window
    ):
        assert rows == starts[-1] and len(starts) == len(tables) == size + 1 and len(lengths) == size
        assert qk == vo and causal and window == -1 and not graph and heads % kv == 0
        assert not any(given.is_cuda for given in (starts, tables, lengths))
        self.plans.append((starts.tolist(), tables.tolist(), lengths.tolist(), page))
        return self.plans[-1]

    def paged_run(self, floats, ints, info, q, keys, values, qo, indptr, indices, last, out, *rest):
        assert rest[:5] == (None, 1, 0, -1, False)
        starts, tables, lengths, page = info
        scale, self.runs = rest[10], self.runs + 1
        assert q.shape[0] == out.shape[0] == starts[-1] and page == keys.shape[1]
        for (first, last), table, length in zip(pairwise(starts), tables[:-1], lengths, strict=True):
            blocks = indices[table : table + -(-length // page)].long()
            k, v = (
                c[blocks].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // c.shape[2], 1) for c in (keys, values)
            )
            score = torch.einsum("thd,lhd->htl", q[first:last].double(), k.double()) * scale
            hidden = torch.ones(score.shape[1:], dtype=torch.bool, device=q.device).triu(length - (last - first) + 1)
            share = score.masked_fill(hidden, -math.inf).softmax(-1)
            out[first:last] = torch.einsum("htl,lhd->thd", share, v.double()).to(out.dtype)


@pytest.fixture
def taken(monkeypatch):
    """Short spans are worth it."""
    monkeypatch.setattr(flashinfer, "paged_is_worth_it", lambda spans: True)


def backend_of(module, dtype=torch.float32, head_dim=64, device=CPU):
    return flashinfer.FlashInferAttention(device, module, dtype, head_dim)


@pytest.mark.skipif(DEVICE == "cuda", reason="the module of this test computes on the CPU")
@pytest.mark.parametrize("spans", [[(12, 40)], [(9, 9), (13, 41)], [(1, 20), (1, 7), (13, 41), (30, 30)]])
def test_spans_of_several_tokens_go_to_the_module_in_place(spans, taken):
    module = Module()
    backend, sent = backend_of(module), case(SHAPE, spans)
    for _ in range(3):  # layers
        assert_near(backend.attend(*sent), slow(*sent))
    assert module.runs == 3 and len(module.plans) == 1, "one schedule serves all layers"
    starts, tables, lengths, _ = module.plans[0]
    longer = [(n, total) for n, total in spans if n > 1]
    assert lengths == [total for _, total in longer]
    assert starts[1:] == torch.tensor([n for n, _ in longer]).cumsum(0).tolist()
    assert tables == [sent[3].tables_SB.shape[1] * number for number in range(len(longer) + 1)]


@pytest.mark.skipif(DEVICE == "cuda", reason="the module of this test computes on the CPU")
@pytest.mark.parametrize(
    "change",
    ["window", "softcap", "dtype", "head_dim", "unknown spans", "short", "compiling", "busy", "large"],
)
def test_what_it_cannot_do_stays_with_our_kernels(change, taken, monkeypatch):
    module = Module()
    window, softcap = 20 if change == "window" else None, 8.0 if change == "softcap" else None
    sent = case((4, 2, 64, 16, window, softcap), [(1, 20), (13, 41)])
    backend = backend_of(
        module, torch.float16 if change == "dtype" else torch.float32, 128 if change == "head_dim" else 64
    )
    if change == "unknown spans":
        sent[3].host_spans = []
    if change == "short":
        monkeypatch.setattr(flashinfer, "paged_is_worth_it", lambda spans: False)
    if change == "compiling":
        monkeypatch.setattr(launch, "COMPILING", True)
    if change == "busy":
        for page in backend._pages.pages:
            page.copied = SimpleNamespace(query=lambda: False)
    if change == "large":
        monkeypatch.setattr(flashinfer, "PAGE_BYTES", flashinfer.FIXED_BYTES)
    for _ in range(1 if change == "compiling" else 2):
        assert_near(backend.attend(*sent), slow(*sent))
    assert module.runs == 0 and module.plans == []


@pytest.mark.skipif(DEVICE == "cuda", reason="the module of this test computes on the CPU")
def test_a_window_that_hides_nothing_is_no_window(taken):
    module, sent = Module(), case((4, 2, 64, 16, 41, None), [(13, 41)])
    assert_near(backend_of(module).attend(*sent), slow(*sent))
    assert module.runs == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="the module of this test computes on the CPU")
def test_a_schedule_that_later_steps_overwrote_is_made_again(taken):
    module = Module()
    backend, sent = backend_of(module), case(SHAPE, [(13, 41)])
    backend.attend(*sent)
    for number in range(flashinfer.PAGES):
        backend.attend(*case(SHAPE, [(5 + number, 30)]))
    assert_near(backend.attend(*sent), slow(*sent))
    assert len(module.plans) == flashinfer.PAGES + 2


def test_where_it_was_measured_to_be_faster():
    worth = library.paged_is_worth_it
    assert worth([(0, 8192)]) and worth([(4096, 64)]) and worth([(0, 6000), (100, 40)]) and worth([(512, 128)] * 64)
    assert not worth([(0, 32)] * 256) and not worth([(4096, 2)]) and not worth([])


@pytest.mark.skipif(DEVICE == "cuda", reason="the module of this test computes on the CPU")
@pytest.mark.parametrize("spans", [[(48, 48)], [(48, 48), (33, 33)], [(1, 5), (48, 48)]])
def test_only_one_long_whole_prompt_alone_is_the_other_library_s(spans, monkeypatch):
    monkeypatch.setattr(library, "STEP", 16)
    monkeypatch.setattr(library, "SHORTEST_PAGED", 16)
    monkeypatch.setattr(library, "SHORTEST_ALONE", 40)
    monkeypatch.setattr(library, "is_worth_it", lambda start, *_: start == 0)
    module, sent = Module(), case(SHAPE, spans)
    sent[1].nan_to_num_(), sent[2].nan_to_num_()
    assert_near(backend_of(module).attend(*sent), slow(*sent))
    assert module.runs == (1 if len(spans) > 1 and spans[0][0] > 1 else 0)


# When it is chosen


@pytest.fixture
def hopper(monkeypatch):
    """A machine that seems to have a Hopper GPU, FlashInfer, and its module."""
    spec = SimpleNamespace(
        is_compiled=True, builds=0, get_library_path=lambda: "module.so", load=lambda path: Module(), asked=None
    )
    spec.build = lambda: setattr(spec, "builds", spec.builds + 1)

    def generate(*args):
        spec.asked = args
        return spec

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flashinfer_module, "version", lambda: flashinfer_module.TRIED[-1])
    modules = SimpleNamespace(gen_batch_prefill_module=generate)
    monkeypatch.setattr(flashinfer_module.importlib, "import_module", lambda name: modules)
    monkeypatch.setattr(flashinfer_module.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for module, name in ((flashinfer, "FlashInferAttention"), (triton, "TritonAttention")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda device, *given, real=real: real(CPU, *given))
    return spec


def choose(name=None, dtype=torch.bfloat16, head_dim=128, **how):
    return attention_backend(name, "cuda", dtype=dtype, head_dim=head_dim, **how)


def test_it_is_the_default_where_it_can_run(hopper, caplog):
    found = choose()
    assert found.name == "flashinfer" and found._dtype == torch.bfloat16 and found._head_dim == 128
    assert hopper.asked[:7] == ("fa3", *[torch.bfloat16] * 3, torch.int32, 128, 128)
    assert not caplog.records
    assert choose("flashinfer", torch.float16, 64).name == "flashinfer"
    assert choose("triton").name == "triton", "asked for by name"


def test_without_it_nothing_changes_and_nothing_is_said(hopper, monkeypatch, caplog):
    monkeypatch.setattr(flashinfer_module, "version", lambda: None)
    assert choose().name == "triton" and not caplog.records
    monkeypatch.setattr(flashinfer_module, "version", lambda: flashinfer_module.TRIED[-1])
    assert choose(deterministic=True).name == "triton" and not caplog.records
    assert attention_backend(None, "cuda").name == "triton", "the model is not known"


def broken(hopper, monkeypatch, how):
    """Make something of it fail; what choose() is to be given, and what the reason says."""
    if how == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        return {}, "capability 9.0"
    if how == "version":
        monkeypatch.setattr(flashinfer_module, "version", lambda: "9.9.9")
        return {}, "9.9.9 was not tried"
    if how == "dtype":
        return {"dtype": torch.float32}, "not in float32"
    if how == "head_dim":
        return {"head_dim": 80}, "not of 80"
    if how == "not built":
        hopper.is_compiled = False
        return {}, "not built"
    if how == "import":
        monkeypatch.setattr(
            flashinfer_module.importlib, "import_module", lambda name: __import__("no_such_module_here")
        )
        return {}, "cannot be loaded: No module named 'no_such_module_here'"
    if how == "load":
        hopper.load = lambda path: (_ for _ in ()).throw(OSError("undefined symbol\nand a page of others"))
        return {}, "cannot be loaded: undefined symbol"
    if how == "crash":
        hopper.load = lambda path: SimpleNamespace()
        return {}, "its module fails here"
    assert how == "wrong"

    class Wrong(Module):
        def paged_run(self, *args):
            super().paged_run(*args)
            args[10].mul_(1.1)

    hopper.load = lambda path: Wrong()
    return {}, "is wrong here: relative error 0.1"


@pytest.mark.parametrize(
    "how", ["capability", "version", "dtype", "head_dim", "not built", "import", "load", "crash", "wrong"]
)
def test_what_fails_is_found_at_the_start(how, hopper, monkeypatch, caplog):
    given, reason = broken(hopper, monkeypatch, how)
    with caplog.at_level(logging.WARNING, "tandem.attention"):
        assert choose(**given).name == "triton"
    assert len(caplog.records) == 1 and reason in caplog.text and "\n" not in caplog.records[0].message
    with pytest.raises(SettingError) as refused:
        choose("flashinfer", **given)
    assert reason in str(refused.value) and refused.value.hint


def test_forcing_what_cannot_be_is_refused(hopper, monkeypatch):
    with pytest.raises(SettingError, match="not batch-invariant") as refused:
        choose("flashinfer", deterministic=True)
    assert "--deterministic" in refused.value.hint
    with pytest.raises(SettingError, match="cannot run on cpu"):
        attention_backend("flashinfer", "cpu")
    monkeypatch.setattr(flashinfer_module, "version", lambda: None)
    with pytest.raises(SettingError, match="is not installed") as refused:
        choose("flashinfer")
    assert f"=={flashinfer_module.TRIED[-1]}" in refused.value.hint


def test_only_who_asks_for_it_waits_for_a_compiler(hopper, monkeypatch, tmp_path, caplog):
    hopper.is_compiled = False
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert choose().name == "triton" and hopper.builds == 0
    assert "--attention flashinfer" in caplog.text
    assert choose("flashinfer").name == "flashinfer" and hopper.builds == 1
    assert "takes minutes" in caplog.text


# On a GPU that has it


def real_backend(head_dim):
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    try:
        return flashinfer.flashinfer_attention(
            torch.device("cuda", 0), torch.bfloat16, head_dim, deterministic=False, builds=False
        )
    except flashinfer.UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of what FlashInfer imports
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (4, 4)])
@pytest.mark.parametrize("spans", [MIXED, [(513, 529), (129, 129), (2, 335), (127, 1127)]])
def test_gpu_results_are_near_float64(heads, spans, taken):
    backend = real_backend(128)
    queries, keys, values, batch, asked = case((*heads, 128, 16, None, None), sorted(spans, key=lambda s: s[0] > 1))
    queries, keys, values = queries.bfloat16(), keys.bfloat16(), values.bfloat16()
    found, want = backend.attend(queries, keys, values, batch, asked), slow(queries, keys, values, batch, asked)
    assert any(isinstance(made, flashinfer._Schedule) for made in batch.scratch.values())
    assert (found.double() - want).norm() / want.norm() < 6e-3
