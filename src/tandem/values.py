"""What a caller handed over, as plain values: each check gives an int, float, str or tuple, or raises RequestError.

It knows types and ranges; it does not know what the fields that it names mean. Numbers of other libraries are taken
by their abstract types, so none of those libraries is imported.
"""

import math
import numbers
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tandem.errors import RequestError

INTEGER_LIMIT = 2**63
"""Integers of a request lie in -INTEGER_LIMIT .. INTEGER_LIMIT - 1: what 64 bits hold."""


def is_integer(value: object) -> bool:
    """Whether it is an integer of any library; a truth value is none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def checked_number(name: str, value: Any, low: float, high: float, open_low: bool = False, of: str = "") -> float:
    """value as a float from low (or above it) to high. of: whose, for the message. Raises RequestError."""
    number = value if type(value) is float else math.nan
    if number is not value and isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not low <= number <= high or (open_low and number == low):
        raise RequestError(
            f"{name}{of} is {show(value)}; it must be a number {'above' if open_low else 'from'} {low:g} "
            f"up to {high:g}.",
            param=name,
        )
    return number


def checked_integer(name: str, value: Any, low: int, high: int | None) -> int:
    """value as an int from low to high. Raises RequestError."""
    if not is_integer(value) or value < low or (high is not None and value > high):
        span = f"from {low} up" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {show(value)}; it must be an integer {span}.", param=name)
    return int(value)


def checked_token(name: str, value: Any) -> int:
    """A token id; whether the model has it, check_vocabulary says."""
    if not is_integer(value):
        raise RequestError(f"{name} holds {show(value)}, which is no token id.", param=name)
    return checked_integer(name, value, -INTEGER_LIMIT, INTEGER_LIMIT - 1)


def checked_items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """value as a tuple; None is none. Raises RequestError."""
    if value is None or type(value) is tuple:
        return value or ()
    if not isinstance(value, str | bytes | bytearray | Mapping) and isinstance(value, Iterable):
        with suppress(TypeError):  # an array of no dimension is called iterable, and is not
            return tuple(value)
    raise RequestError(f"{name} is {show(value)}; it must be a list of {what}.", param=name)


def checked_text(name: str, value: Any, limit: int | None = None) -> str:
    """value as a plain str. Raises RequestError if it is none, has half a surrogate pair, or too many characters."""
    if not isinstance(value, str):
        raise RequestError(f"{name} is {show(value)}; it must be a string.", param=name)
    if limit is not None and len(value) > limit:
        raise RequestError(f"{name} has {len(value)} characters; the limit is {limit}.", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is no valid Unicode: {error}.", param=name) from error
    return str.__str__(value)  # of a subclass, its characters


def show(value: object, limit: int = 80) -> str:
    """A value as an error shows it: never long, never a failure of its own."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, a defective __repr__
        return f"of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}…"
