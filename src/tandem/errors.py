"""The tree of errors. It knows how an error teaches; it does not know who raises it.

TandemError
├── SettingError          a setting is unknown, ill-typed or out of range
├── RequestError          one request asks for what cannot be honoured (an HTTP 4xx)
│   ├── ContextLengthError    it is longer than the model's context
│   ├── CapacityError         it can never fit into this engine's KV pool
│   └── GrammarError          its grammar could not be followed to the end
├── ModelError            a model's configuration is not supported
├── WeightsError          a weights file is missing, broken or does not fit the model
├── DownloadError         a model could not be fetched
├── DeviceMemoryError     the device has too little memory for the settings
└── EngineDeadError       the engine has stopped; nothing more will come from it
"""


class TandemError(Exception):
    """An error that teaches: what is wrong, the value, the limit, and what to do.

    what  one or two sentences naming the thing, the value seen and the limit.
    hint  what the reader can do about it; printed on a line of its own behind ``hint:``.
    """

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        self.what = what
        self.hint = hint
        super().__init__(what if hint is None else f"{what}\nhint: {hint}")


class SettingError(TandemError):
    """A setting is unknown, ill-typed or out of range."""


class RequestError(TandemError):
    """One request cannot be honoured; it harms nobody else.

    param  the field at fault, as the client wrote it, or None.
    code   a short machine-readable word, as in the OpenAI API's error bodies.
    """

    code = "invalid_value"

    def __init__(
        self, what: str, *, param: str | None = None, code: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what, hint=hint)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthError(RequestError):
    """Prompt and wanted tokens together are longer than the model's context."""

    code = "context_length_exceeded"


class CapacityError(RequestError):
    """The request could never run here, however long it waited: it is larger than the whole KV pool."""

    code = "kv_capacity_exceeded"


class GrammarError(RequestError):
    """The answer had begun when its grammar reached a limit, or a place that no token goes on from."""

    code = "grammar_failed"


class ModelError(TandemError):
    """A model's configuration is not supported or contradicts itself."""


class WeightsError(TandemError):
    """A weights file is missing, broken, or does not fit the model."""


class DownloadError(TandemError):
    """A model could not be fetched; nothing half-written was left behind."""


class DeviceMemoryError(TandemError):
    """The device has too little memory for what the settings ask."""


class EngineDeadError(TandemError):
    """The engine has stopped and will answer nothing more."""
