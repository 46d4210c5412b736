"""Prompt and answer lengths that a model's context has room for. It knows options by name, and builds no engine."""

from collections.abc import Callable, Mapping
from typing import Any

from tandem.engine.build import context_length
from tandem.errors import SettingError


class Lengths:
    """Fits lengths into the room of a model: its context, or max_model_len where the user gave that.

    prompt_option, new_option   what the user would change, as "--prompt".
    Raises what finding a model raises.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        prompt_option: str = "--prompt",
        new_option: str = "--new",
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> None:
        context, asked = context_length(settings, on_phase), settings.get("max_model_len")
        own = isinstance(asked, int) and asked < context
        self.room: int = asked if own and isinstance(asked, int) else context
        self._whose = "max_model_len" if own else "the model's context"
        self._prompt_option, self._new_option, self._on_phase = prompt_option, new_option, on_phase

    def fit(self, prompt: int | None, new: int | None, usual: tuple[int, int]) -> tuple[int, int]:
        """(prompt, new) as asked, or else the usual ones, cut with a line to what the room holds.

        Raises SettingError if what was asked for does not fit.
        """
        if (prompt or 1) + (new or 1) > self.room:
            raise self._refused(prompt, new)
        found_prompt = prompt or min(usual[0], max(1, self.room // 2), self.room - (new or 1))
        found_new = new or min(usual[1], self.room - found_prompt)
        for name, found, wanted in (
            (self._prompt_option, found_prompt, prompt or usual[0]), (self._new_option, found_new, new or usual[1])
        ):  # fmt: skip
            if found < wanted:
                self._on_phase(f"{name} is {found:,}, not {wanted:,}: {self._whose} is {self.room:,} tokens")
        return found_prompt, found_new

    def _refused(self, prompt: int | None, new: int | None) -> SettingError:
        parts = [f"{self._prompt_option} {prompt}"] if prompt else []
        parts += [f"{self._new_option} {new}"] if new else []
        hints = (
            [f"{self._new_option} to at most {self.room - (prompt or 1)}"] if new and self.room > (prompt or 1) else []
        )
        hints += (
            [f"{self._prompt_option} to at most {self.room - (new or 1)}"] if prompt and self.room > (new or 1) else []
        )
        return SettingError(
            f"{' and '.join(parts)} are more than {self._whose}, {self.room} tokens.",
            hint=f"lower {', or '.join(hints)}." if hints else f"lower {' and '.join(parts)}.",
        )
