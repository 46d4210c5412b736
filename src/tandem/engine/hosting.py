"""Which host a front end gets: a thread or a process. It knows neither requests nor text."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tandem.config import Settings
from tandem.engine.contract import Host, Listener
from tandem.engine.host import ThreadHost
from tandem.engine.process import MAKE, ProcessHost
from tandem.errors import SettingError

OnPhase = Callable[[str], None]


def settings_of(settings: Settings | str | None, fields: dict[str, Any]) -> Settings:
    """Settings as a whole, or a model's name and single fields. Raises SettingError."""
    if isinstance(settings, Settings):
        if fields:
            raise SettingError(
                f"settings are given as a whole and also one by one: {', '.join(fields)}.",
                hint="put everything into the Settings, or give everything by name.",
            )
        return settings
    return Settings.from_dict({"model": settings, **fields})


def start_host(
    settings: Settings, listener: Listener, *, in_process: bool, on_phase: OnPhase | None = None, make: str = MAKE,
    options: dict[str, Any] | None = None,
) -> Host:  # fmt: skip
    """Start to build a loop; ``ready`` of the host tells when it is done.

    make      "module:function" with the signature of build.make_loop.
    options   settings for another ``make`` than the engine's own, instead of the Settings' fields.
    """
    values = asdict(settings) if options is None else options
    if not in_process:
        return ProcessHost(values, listener, on_phase, make)
    import importlib

    module, _, function = make.partition(":")

    def build(mailbox: Any) -> Any:
        return getattr(importlib.import_module(module), function)(values, mailbox, on_phase or (lambda text: None))

    return ThreadHost(build, listener)
