"""The inputs on the wire: what a table of them says, and the reading of values by it.

The tables stand beside the resolvers (``ditpack.request`` and others); docs/wire.md is made of them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ditpack.errors import InvalidRequest

Fields = Mapping[str, "Field"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One input: the rule that its values are read by, and what people are told about it.

    ``default`` counts when it is not sent; where that is not the same for everybody, ``unsent`` says it in words.
    ``low`` and ``high`` are allowed themselves.
    """

    about: str
    default: Any = None
    unsent: str = ""
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The rule in words, as errors end with it; "" when there is none that fits in these members."""
        if self.choices:
            return f"must be one of {', '.join(self.choices)}"
        if self.high is not None:
            return f"must be between {self.low} and {self.high}"
        if self.low is not None:
            return f"must be a finite number of at least {self.low}"
        return ""


def check_known(values: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Raise InvalidRequest for a field that is none of ``fields``."""
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise InvalidRequest(unknown[0], values[unknown[0]], f"unknown field; known are {', '.join(fields)}")


def text(values: Mapping[str, Any], name: str, field: Field) -> str | None:
    """A str or UTF-8 bytes, one of the field's choices if it has any."""
    value = values.get(name)
    if value is None:
        return field.default
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(name, value, "must be valid UTF-8") from None
    if not isinstance(value, str):
        raise InvalidRequest(name, value, "must be a string")
    if field.choices and value not in field.choices:
        raise InvalidRequest(name, value, field.allowed)
    return value


def number(values: Mapping[str, Any], name: str, field: Field) -> float:
    """A finite number of at least ``field.low``; the field has both that and a default."""
    value = values.get(name)
    if value is None:
        value = field.default
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequest(name, value, "must be a number")
    found = float(value)
    if not (math.isfinite(found) and found >= (field.low or 0)):
        raise InvalidRequest(name, found, f"{field.allowed} ({field.about})")
    return found


def integer(values: Mapping[str, Any], name: str, field: Field) -> int | None:
    """An integer from ``field.low`` to ``field.high``; None when it was not sent and the field has no default."""
    value = values.get(name)
    if value is None:
        return field.default
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequest(name, value, "must be an integer")
    found = int(value)
    if field.low is None or field.high is None or not field.low <= found <= field.high:
        raise InvalidRequest(name, found, field.allowed)
    return found
