"""How to serve, in one frozen table; the engine's settings are apart. It knows what the options mean, not who obeys.

The command line's options are derived from the fields and their metadata, as for config.Settings.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from tandem.config import parse_bytes
from tandem.errors import SettingError
from tandem.serve.accept import Limits
from tandem.serve.bodies import Bodies
from tandem.serve.service import QueueLimits


def _option(default: Any, group: str, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": text, **more})


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What an operator chooses. Times in seconds; None: no limit."""

    host: str = _option(
        "127.0.0.1", "address", "address to listen on; 0.0.0.0 or :: is open to the network", unit="address"
    )
    port: int = _option(8000, "address", "port to listen on; 0 takes a free one", low=0, high=65535)
    served_model_name: tuple[str, ...] = _option(
        (), "address", "name that clients ask for; may be given again (default: the model's own)", unit="name"
    )

    api_key_file: str | None = _option(
        None,
        "security",
        "file of API keys, one a line; every route but /health and the page then needs one",
        unit="file",
    )
    cors_origin: tuple[str, ...] = _option(
        (),
        "security",
        "origin whose pages may call from a browser, as https://example.org; may be given again",
        unit="origin",
    )
    allowed_host: tuple[str, ...] = _option(
        (),
        "security",
        "name in the Host header that requests may have beside localhost; may be given again",
        unit="name",
    )
    tls_certificate: str | None = _option(
        None, "security", "PEM file of the certificate chain: serve HTTPS", unit="file"
    )
    tls_key: str | None = _option(
        None, "security", "PEM file of the private key, if apart from the certificate", unit="file"
    )

    max_requests: int | None = _option(
        1024,
        "limits",
        "most requests in the server at once, one with several answers counted as so many; more get 429",
        low=1,
    )
    max_queued_tokens: int | None = _option(
        None, "limits", "most prompt tokens in the server at once, counted for each answer; more get 429", low=1
    )
    queue_timeout: float | None = _option(
        None, "limits", "longest wait for a first token; then 503", unit="seconds", low=0.001
    )
    header_timeout: float = _option(
        10.0,
        "limits",
        "longest wait for a request's header, and for a TLS handshake; then 408",
        unit="seconds",
        low=0.01,
    )
    body_timeout: float = _option(
        60.0, "limits", "longest wait for a request's body; then 408", unit="seconds", low=0.01
    )
    max_time: float = _option(
        3600.0, "limits", "longest time of one request; a client may ask for less", unit="seconds", low=0.001
    )
    max_body: int = _option("4MiB", "limits", "largest request body; larger get 413", unit="bytes", low=1024)
    max_bodies: int = _option(
        "64MiB",
        "limits",
        "memory for request bodies that are read or encoded; more get 503, or 429 beyond one client's share",
        unit="bytes",
        low=1024,
    )
    max_connections: int | None = _option(
        None, "limits", "most open connections; more get 503 (default: 8192, or what descriptors allow)", low=1
    )
    max_n: int = _option(16, "limits", "most answers to one prompt", low=1, high=128)
    max_prompts: int = _option(256, "limits", "most prompts in one completion request", low=1)
    max_answers: int | None = _option(
        None, "limits", "most answers to one request, prompts times n (default: a quarter of --max-requests)", low=1
    )
    client_reserve: float = _option(
        0.125,
        "limits",
        "share of --max-requests, --max-queued-tokens, --max-bodies and --max-logprobs that is kept for clients (API "
        "keys, or else addresses) which hold no more than that share",
        unit="share",
        low=0.0,
        high=1.0,
    )
    max_answer_logprobs: int = _option(
        1 << 20, "limits", "most log-probabilities in one answer that is not streamed, alternatives among them", low=1
    )
    max_logprobs: int | None = _option(
        8 << 20,
        "limits",
        "most log-probabilities that all requests together may hold until they are sent, some 110 bytes each; more "
        "get 429",
        low=1,
    )

    keep_alive: float = _option(
        10.0, "life", "seconds of silence in a stream before a comment line is sent", unit="seconds", low=0.01
    )
    drain_timeout: float = _option(30.0, "life", "time that running requests have after SIGTERM", unit="seconds", low=0)
    stall_timeout: float = _option(
        60.0, "life", "a step that takes longer counts as an engine that died", unit="seconds", low=0.05
    )
    linger: float = _option(
        2.0, "life", "time that /health still says 503 after the engine died", unit="seconds", low=0
    )

    vllm_metric_names: bool = _option(False, "observing", "/metrics shows the names that vLLM's dashboards read, too")
    otlp_endpoint: str | None = _option(
        None, "observing", "OpenTelemetry collector, as http://127.0.0.1:4318: one span a request", unit="url"
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, str) and f.metadata.get("unit") == "bytes":
                value = parse_bytes(value)
                object.__setattr__(self, f.name, value)
            if isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))
            low, high = f.metadata.get("low"), f.metadata.get("high")
            if value is None or low is None:
                continue
            if not math.isfinite(value) or value < low or (high is not None and value > high):
                bounds = f"at least {low}" if high is None else f"from {low} to {high}"
                raise SettingError(f"{f.name} is {value!r}; it must be {bounds}.")
        if self.tls_key is not None and self.tls_certificate is None:
            raise SettingError("tls_key is given, but no certificate.", hint="add --tls-certificate FILE.")
        for host in self.allowed_host:
            if not host.strip() or "/" in host:
                raise SettingError(f"allowed_host is {host!r}; it must be a name.", hint="as chat.example.org.")
        if any(not name for name in self.served_model_name):
            raise SettingError("served_model_name is empty.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ServeOptions":
        return cls(**values)

    @property
    def limits(self) -> Limits:
        most = self.max_answers
        if most is None:
            most = Limits().max_answers if self.max_requests is None else max(self.max_n, self.max_requests // 4)
        return Limits(self.max_body, self.max_n, self.max_prompts, self.max_time, most, self.max_answer_logprobs)

    @property
    def bodies(self) -> Bodies:
        return Bodies(self.max_bodies, self.body_timeout, self.client_reserve)

    @property
    def queue(self) -> QueueLimits:
        return QueueLimits(
            self.max_requests, self.max_queued_tokens, self.queue_timeout, self.client_reserve, self.max_logprobs
        )
