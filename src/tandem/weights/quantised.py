"""Quantised checkpoints presented as dense tensors."""

from typing import Any

from tandem.errors import WeightsError
from tandem.weights.stored import Stored


def dense_stored(stored: list[Stored], config: dict[str, Any]) -> list[Stored]:
    """The tensors as they are; a quantised checkpoint is refused."""
    if config.get("quantization_config"):
        raise WeightsError("quantised checkpoints are not read yet.")
    return stored
