"""The command line: help, errors and exit statuses, and whole commands on the null runner and a tiny random model."""

import contextlib
import hashlib
import importlib
import io
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.cli import COMMANDS, main
from tandem.cli.options import Parser, add_settings, settings_of
from tandem.config import Settings
from tandem.engine.blocking import BlockingEngine
from tandem.errors import TandemError

NULL = ["--device", "null"]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdin is empty and no terminal, as under a service."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


def fails(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as exit:
        return int(exit.code or 0)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main([]) == 2 and "COMMAND" in capsys.readouterr().err
    assert fails(["--version"]) == 0 and tandem.__version__ in capsys.readouterr().out


BENCHES = [["bench", name] for name in ("offline", "host", "decode", "seed")]


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS), *BENCHES])
def test_each_command_helps(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fails([*words, "--help"]) in (0, 2)
    text = "".join(capsys.readouterr())
    assert "examples:" in text and f"tandem {' '.join(words)}" in text
    assert max(map(len, text.splitlines())) <= 120


UNITS = {
    r"--(.*-timeout|timeout|max-time|keep-alive|linger)": "SECONDS",
    r"--.*-ms": "MS",
    r"--(client-reserve|gpu-memory-utilization)": "SHARE",
    r"--(kv-cache-memory|max-body|max-bodies)": "BYTES",
    r"--(.*-file|chat-template|tls-certificate|tls-key|cacert)": "FILE",
    r"--(url|base-url|otlp-endpoint)": "URL",
}
"""Name of an option → what its value is. An option of one of these units has such a name, or is missing here."""
SAID = {"SECONDS": "long|time|seconds", "SHARE": "^share", "BYTES": "bytes|body|bodies", "FILE": r"\b[Ff]ile"}


@pytest.mark.parametrize("words", [*([name] for name in COMMANDS if name != "bench"), *BENCHES, ["bench", "serve"]])
def test_the_help_names_what_a_value_is(words: list[str]) -> None:
    """No share in seconds, no file that is a text."""
    name = words[-1] if len(words) == 1 else "_".join(words)
    parser = Parser()
    importlib.import_module(f"tandem.cli.{name}").add_arguments(parser)
    for action in parser._actions:
        if action.metavar is None or not action.option_strings:
            continue
        option = action.option_strings[-1]
        unit = next((unit for pattern, unit in UNITS.items() if re.fullmatch(pattern, option)), None)
        assert (action.metavar == unit) if unit else (action.metavar not in UNITS.values()), (option, action.metavar)
        assert re.search(SAID.get(unit or "", ""), str(action.help)), (option, action.help)
        kind = getattr(action.type, "__name__", None)
        if kind in ("int", "count"):
            assert action.metavar == "N", option
        elif kind == "float":
            assert action.metavar in ("X", "SECONDS", "MS", "SHARE"), option
        else:
            assert action.metavar not in ("N", "X", "SECONDS", "MS", "SHARE"), option


def test_every_setting_is_an_option() -> None:
    parser = Parser()
    add_settings(parser)
    words = ["--max-num-seqs", "7", "--kv-cache-memory", "5MB", "--no-prefix-cache", "--depth", "1", "--device", "cpu"]
    given = settings_of(parser.parse_args(words), max_num_seqs=3, seed=4)
    assert given == {
        "max_num_seqs": 7, "kv_cache_memory": "5MB", "prefix_cache": False, "depth": 1, "device": "cpu", "seed": 4
    }  # fmt: skip
    assert Settings.from_dict(given).kv_cache_memory == 5_000_000
    options = {option for action in parser._actions for option in action.option_strings}
    assert {"--" + name.replace("_", "-") for name in Settings.__dataclass_fields__} <= options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rum", "hi"], "did you mean 'run'"),
        (["What is the capital of France?"], 'tandem run "What is'),
        (["run", "--max-num-seq", "4", "hi"], "did you mean --max-num-seqs"),
        (["run", "what", "is"], "quotes"),
        (["run", "--depth", "x", "hi"], "invalid int value"),
        (["run", *NULL, "--depth", "9", "hi"], "from 1 to 4"),
        (["run", *NULL, "--kv-cache-memory", "lots", "hi"], "4GiB"),
        (["run", *NULL, "--temperature", "-1", "hi"], "temperature is -1.0"),
        (["bench", "of"], "offline"),
        (["bench"], "offline"),
        (["run", *NULL, ""], "prompt is empty"),
        (["run", *NULL, "--model", "", "hi"], "model is empty"),
        (["run", *NULL, "caf\udce9"], "not UTF-8"),
        (["trace", "--requests", "0"], "at least 1"),
        (["bench", "offline", "--requests", "8", "0"], "at least 1"),
        (["bench", "offline", "--depths", "7"], "from 0 to 4"),
        (["bench", "offline", "--prompt", "many"], "no length"),
        (["bench", "serve", "--base-url", "somewhere"], "no base URL"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(words) == 2
    out, err = capsys.readouterr()
    assert expected in err and not out
    assert "Traceback" not in err


def test_errors_exit_with_1_and_teach(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["run", "--model", "/no/such/folder.gguf", "hi"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "/no/such/folder.gguf" in err and "Traceback" not in err
    assert main(["run", *NULL, "--max-model-len", "8", "a text longer than eight bytes"]) == 1
    err = capsys.readouterr().err
    assert "the limit is 8" in err and "/reset" not in err
    assert main(["bench", "host", "--batch", "1", "--waiting", "0", "--steps", "3", "--json", "/dev/null/x"]) == 1
    err = capsys.readouterr().err
    assert "error: nothing can be written into /dev/null" in err and "internal" not in err
    monkeypatch.setenv("TANDEM_DEBUG", "1")
    with pytest.raises(TandemError):
        main(["run", *NULL, ""])


def test_an_unexpected_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import tandem.cli.run as run

    def fail(*words: Any, **more: Any) -> None:
        raise ValueError("the first line\nand more")

    monkeypatch.setattr(run, "BlockingEngine", fail)
    assert main(["run", *NULL, "hi"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "internal error: ValueError: the first line" and "TANDEM_DEBUG=1" in lines[1] and len(lines) == 2
    monkeypatch.setenv("TANDEM_DEBUG", "1")
    with pytest.raises(ValueError, match="first line"):
        main(["run", *NULL, "hi"])


def test_help_shows_the_defaults_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(["run", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "random weights (default: 0)" in text and "CUDA graphs (default: on)" in text
    assert "cut otherwise) (default: off)" in text and "longest prompt plus answer, in tokens (default: auto)" in text


def test_a_context_that_the_cache_shortened_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine = BlockingEngine(device="null")
    per_block = engine.card.settings["facts"]["kv_bytes_per_token"] * 16
    engine.close()
    small = ["run", *NULL, "--kv-cache-memory", str(4 * per_block)]
    assert main([*small, "x" * 500]) == 1
    err = capsys.readouterr().err
    assert "the limit is 64" in err and "what the KV cache holds" in err and "--kv-cache-memory" in err


class Typist:
    """Stands in for a terminal: input() gives the lines, then the end; sys.stdin says that it is a terminal."""

    def __init__(self, *lines: Any) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str = "") -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    def isatty(self) -> bool:
        return True


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: Any) -> None:
    typist = Typist(*lines)
    monkeypatch.setattr("builtins.input", typist)
    monkeypatch.setattr("sys.stdin", typist)


def test_chat_remembers_until_reset(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *NULL, "--max-tokens", "6"]
    prompts: list[list[dict[str, str]]] = []
    encode = BlockingEngine.encode_chat

    def spy(self: BlockingEngine, messages: list[dict[str, str]], **options: Any) -> list[int]:
        prompts.append([dict(message) for message in messages])
        return encode(self, messages, **options)

    monkeypatch.setattr(BlockingEngine, "encode_chat", spy)
    type_in(monkeypatch, "one", KeyboardInterrupt(), "", "two", "/reset", "three", "/what", "/exit", "never")
    assert main([*words, "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert [[m["role"] for m in messages] for messages in prompts] == [
        ["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]
    ]  # fmt: skip
    assert prompts[1][2]["content"] in out, "its own answer is part of the conversation"
    assert "forgotten" in err and "no command /what" in err
    assert len(out.splitlines()) >= 3


def test_an_error_harms_one_message_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "x" * 500, "short")
    assert main(["run", *NULL, "--max-tokens", "5", "--max-model-len", "64"]) == 0
    out, err = capsys.readouterr()
    assert "the limit is 64" in err and len(out.strip()) > 0


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tandem.cli.run as run

    count = 0

    class Impatient(run._Clock):
        def count(self, update: Any) -> None:
            nonlocal count
            super().count(update)
            count += 1
            if count == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "_Clock", Impatient)
    stopped: list[bool] = []
    answer = run.Talk.answer

    def spy(self: Any, text: str) -> str:
        with contextlib.suppress(KeyboardInterrupt):
            answer(self, text)
        stopped.append(self.interrupted)
        return ""

    monkeypatch.setattr(run.Talk, "answer", spy)
    type_in(monkeypatch, "go on for ever", "and now")
    assert main(["run", *NULL, "--max-tokens", "3000", "--ignore-eos"]) == 0
    assert stopped == [True, False]


def test_info_says_what_is_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", *NULL, "--max-num-seqs", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["max_num_seqs"] == 5 and document["reasons"]["max_num_seqs"] == "asked"
    assert document["machine"]["tandem"] == tandem.__version__ and document["machine"]["cores"] >= 1
    assert main(["info", *NULL]) == 0
    text = capsys.readouterr().out
    assert "KV cache" in text and "the default on null" in text


def test_pull_prints_where_the_model_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tandem.weights import pull as pulling
    from tandem.weights.pull import EMBEDDED_FILE

    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(pulling, "EMBEDDED_BYTES", 5)
    monkeypatch.setattr(pulling, "EMBEDDED_SHA256", hashlib.sha256(b"model").hexdigest())
    (tmp_path / EMBEDDED_FILE).write_bytes(b"model")  # whole by its hash: found without fetching
    assert main(["pull"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / EMBEDDED_FILE)


def test_trace_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "--model", "tiny", "--load-format", "random", "--requests", "3", "--prompt", "5", "--new", "6"]
    assert main([*words, "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "device active" in out and "idle: host planning" in out
    names = {e["name"].split()[0] for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    assert {"plan", "submit", "compute", "settle"} <= names
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    figures = json.loads((tmp_path / "timeline-figures.json").read_text())
    assert figures["new_tokens"] == 18 and 0.0 < figures["timeline"]["device_active_share"] <= 1.0
    assert figures["settings"]["settings"]["depth"] == 2


def test_trace_without_matplotlib_says_so_before_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["trace", *NULL, "--requests", "2", "--prompt", "5", "--new", "6", "--out", str(tmp_path)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err.startswith("note: no picture") and 'pip install "tandem-llm[plot]"' in err
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.json", "timeline-figures.json"}
    assert "timeline.png" not in out
    assert main(["bench", "offline", *NULL, "--plot", str(tmp_path / "x.png")]) == 1
    out, err = capsys.readouterr()
    assert "matplotlib is not installed" in err and not out and "depth" not in err


def test_bench_offline_warns_on_a_busy_machine_and_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tandem.cli.bench_offline as offline
    from tandem.bench import machine

    def fail(*words: Any) -> None:
        raise TandemError("the peer failed.")

    monkeypatch.setattr(offline, "_run_peers", fail)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (100.0 * machine.num_cores(), 0.0, 0.0))
    words = ["bench", "offline", *NULL, "--requests", "2", "--prompt", "4", "--new", "4", "--repeats", "1"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert err.startswith("warning: this machine is busy") and "error: the peer failed." in err
    assert "tandem (depth 2)" in out and "tok/s" in out
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert machine.load_warning() is None
