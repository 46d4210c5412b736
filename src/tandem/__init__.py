"""tandem: an LLM inference engine in which host and device work in tandem."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tandem.engine.engine import AsyncEngine
    from tandem.engine.llm import LLM
    from tandem.request import SamplingParams

__all__ = ["LLM", "AsyncEngine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Load the engine only when it is asked for, so that ``import tandem`` stays quick."""
    if name == "LLM":
        from tandem.engine.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from tandem.engine.engine import AsyncEngine

        return AsyncEngine
    if name == "SamplingParams":
        from tandem.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
