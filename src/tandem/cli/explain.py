"""Show where the time of an answered request went.

Asks a running server for its account of the request. ID is the answer's id, as it stands in the answer and in its
x-request-id header; the server keeps the newest 1024.
"""

import argparse
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

from tandem.bench.load_trust import distrust, tls_context
from tandem.cli.options import add_cacert
from tandem.errors import SettingError, TandemError

KEY_VARIABLE = "TANDEM_API_KEY"
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20
EPILOG = f"""
environment:
  {KEY_VARIABLE}     the API key to send, if --api-key is not given

examples:
  tandem explain chatcmpl-9f2c                          a request of the server on this machine
  tandem explain resp_9f2c --url https://host:8000      one of another server
  tandem explain chatcmpl-9f2c --json                   the account as the server gives it
"""
# What each part of the time is; in the order in which they pass.
PARTS = {
    "receive": "reading the request, template, tokenizer",
    "queue": "waiting for a row",
    "preempted": "put back for want of KV blocks",
    "prefill": "steps that computed its prompt",
    "decode": "steps that computed its tokens",
    "behind": "steps of others, while it had a row",
    "host_gap": "the device waited for the host",
    "delivery": "from the step's end to the news of it",
    "relay": "from the engine to the answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the answer's id")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: http://127.0.0.1:8000)"
    )
    add_cacert(parser)
    parser.add_argument("--api-key", metavar="KEY", help=f"an API key of the server (default: ${KEY_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")


def main(arguments: argparse.Namespace) -> int:
    key = arguments.api_key or os.environ.get(KEY_VARIABLE, "").split(",")[0].strip()
    account = fetch(arguments.url, arguments.id, key, arguments.cacert)
    print(json.dumps(account, indent=2) if arguments.json else "\n".join(lines_of(account)))
    return 0


def fetch(url: str, name: str, key: str = "", cacert: str | None = None) -> dict[str, Any]:
    """The server's account of a request. Raises TandemError saying why there is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError(f"{url!r} is no URL of a server.", hint="write it as http://127.0.0.1:8000.")
    base = url.rstrip("/").removesuffix("/v1")
    if not (key.isascii() and key.isprintable()):
        raise SettingError("the API key holds characters that no header can carry.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{base}/explain/{quote(name, safe='')}", headers=headers)
    secure = urllib.request.HTTPSHandler(context=tls_context(base, cacert))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            account = json.loads(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        raise _refused(error, base, name) from None
    except OSError as error:
        raise _unreachable(error, base) from None
    except (ValueError, http.client.HTTPException):
        raise TandemError(f"what answers at {base} is no tandem server.") from None
    if not isinstance(account, dict) or not isinstance(account.get("parts_s"), dict):
        raise TandemError(f"what answers at {base} is no tandem server.")
    return account


def lines_of(account: dict[str, Any]) -> list[str]:
    """The account as a table. The parts are of the answer that ended last; they sum to the end-to-end time."""
    total_s, parts = account["total_s"], account["parts_s"]
    lines = [f"request   {account.get('id', '')}"]
    if not parts:
        return [*lines, f"total     {_time(total_s)}, and the engine has forgotten the rest"]
    lines += ["", f"{'part':<10}{'time':>12}{'share':>9}"]
    for name in (*(name for name in PARTS if name in parts), *(name for name in parts if name not in PARTS)):
        share = parts[name] / total_s if total_s else 0.0
        lines.append(f"{name:<10}{_time(parts[name]):>12}{share:>8.1%}   {PARTS.get(name, '')}".rstrip())
    summed_s = sum(parts.values())
    lines.append(f"{'sum':<10}{_time(summed_s):>12}{summed_s / total_s if total_s else 0.0:>8.1%}")
    lines.append(f"{'total':<10}{_time(total_s):>12}           end to end, as the server saw it")
    for answer in account.get("answers", ()):
        lines += ["", *_lines_of_answer(answer)]
    return lines


def _lines_of_answer(answer: dict[str, Any]) -> list[str]:
    name = f"prompt {answer.get('prompt', 0)}, answer {answer.get('index', 0)}"
    lines = [
        f"{name}: {answer.get('tokens', 0)} tokens, finish {answer.get('finish')}; {answer.get('cached_tokens', 0)} "
        f"prompt tokens cached; {answer.get('prefill_chunks', 0)} prefill chunks, {answer.get('decode_steps', 0)} "
        f"decode steps, {answer.get('preemptions', 0)} preemptions",
    ]
    waits = [f"{reason} {_time(wait_s)}" for reason, wait_s in answer.get("queue_why_s", {}).items()]
    return [*lines, f"  waited for: {', '.join(waits)}"] if waits else lines


def _refused(error: urllib.error.HTTPError, base: str, name: str) -> TandemError:
    try:
        told = json.loads(error.read(MAX_ANSWER_BYTES))["error"]
        message, code = str(told["message"]).partition("\nhint: ")[0], told["code"]
    except (ValueError, KeyError, TypeError, OSError):
        return TandemError(f"what answers at {base} is no tandem server: it said {error.code}.")
    if code == "invalid_api_key":
        return TandemError(f"{base} wants an API key.", hint=f"give it with --api-key, or as {KEY_VARIABLE}.")
    hint = None
    if code == "not_found" and "/explain/" in message:  # it knows no such route
        return TandemError(f"what answers at {base} is no tandem server.")
    if code == "not_found":
        hint = "the id stands in the answer and its x-request-id header; the newest 1024 answers are kept."
    return TandemError("".join(c if c.isprintable() else "?" for c in message), hint=hint)


def _unreachable(error: OSError, base: str) -> TandemError:
    """Why there is no answer. urllib wraps what went wrong before the request was sent."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLError):
        return distrust(base, reason)
    if isinstance(reason, ConnectionError) and not isinstance(reason, ConnectionRefusedError):
        hint = "a server with a certificate has https:// in its URL." if base.startswith("http:") else "try again."
        return TandemError(f"the server at {base} closed the connection without an answer.", hint=hint)
    hint = "start one with `tandem serve`, or give its --url."
    return TandemError(f"no server answers at {base}: {reason}.", hint=hint)


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1.0 else f"{1000 * seconds:.3f} ms"
