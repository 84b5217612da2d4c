"""config.pbtxt to a protobuf message, and protobuf's complaints in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, text_format
from tritonclient.grpc import model_config_pb2

from ditpack.tritonserver.check.findings import Finding, did_you_mean
from ditpack.tritonserver.check.positions import Node, locate

# What protobuf's parser says, without its position and its echo of the line → the message and the fix.
_UNKNOWN_ENUM = re.compile(r'Enum type "([^"]+)" has no value named (\S+)\.')
_ONEOF = re.compile(r'Field "([^"]+)" is specified along with field "([^"]+)", another member of oneof "([^"]+)"')
_TWICE = re.compile(r'Message type "[^"]+" should not have multiple "([^"]+)" fields')
_EXPECTED = re.compile(r'Expected "([^"]+)"\.')
_NUMBER = re.compile(r"(?:Couldn't parse integer|Couldn't parse float|Value out of range): (.*)")
_QUOTE = re.compile(r"String missing ending quote")
_ECHO = re.compile(r"^\d+:\d+ : (?:'.*': )?(?=[A-Z])", re.DOTALL)


def parse(file: Path) -> tuple[Any | None, Node | None, list[Finding]]:
    """``file`` as ``inference.ModelConfig`` and its positions; both None when it cannot be read at all.

    Unknown fields are all reported and then left out, so that the rules can look at the rest.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return None, None, [Finding(file, 0, 0, "error", "unreadable", f"cannot be read: {why}", "Replace the file.")]
    if text.startswith("\ufeff"):
        message = "starts with a byte order mark, which Triton's parser does not take"
        return None, None, [Finding(file, 1, 1, "error", "syntax", message, "Save the file as UTF-8 without one.")]
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, config, allow_unknown_field=True)
    except text_format.ParseError as error:
        return None, None, [_explain(file, text, error)]
    where = locate(text)
    return config, where, list(_unknown_fields(file, where, config.DESCRIPTOR))


def _unknown_fields(file: Path, node: Node, descriptor: Any) -> Iterator[Finding]:
    for name, occurrences in node.fields.items():
        known = descriptor.fields_by_name.get(name)
        for occurrence in occurrences:
            if known is None:
                message = f"{_described(descriptor)} has no field {name!r}"
                fix = did_you_mean(name, descriptor.fields_by_name)
                yield Finding(file, occurrence.line, occurrence.column, "error", "unknown-field", message, fix)
            elif known.message_type is not None:
                yield from _unknown_fields(file, occurrence, known.message_type)


def _described(descriptor: Any) -> str:
    return "a model's config" if descriptor.name == "ModelConfig" else descriptor.name


def _explain(file: Path, text: str, error: text_format.ParseError) -> Finding:
    line, column = error.GetLine() or 0, error.GetColumn() or 0
    raw = _ECHO.sub("", str(error))
    lines = text.splitlines()
    shown = lines[line - 1][column - 1 :].split() if 0 < line <= len(lines) else []
    found = repr(shown[0]) if shown else "the end of the file"
    for pattern, rule, words in _WORDS:
        match = pattern.search(raw)
        if match:
            message, fix = words(match, found)
            return Finding(file, line, column, "error", rule, message, fix)
    return Finding(file, line, column, "error", "syntax", raw.rstrip("."), "Correct the text at this place.")


def _enum(match: re.Match[str], found: str) -> tuple[str, str]:
    values = descriptor_pool.Default().FindEnumTypeByName(match[1]).values_by_name
    prefix = next(iter(values)).partition("_")[0]
    meant = f"{prefix}_{match[2]}"
    fix = f"Write {meant}." if meant in values else did_you_mean(match[2], set(values) - {"TYPE_INVALID"})
    return f"{match[2]!r} is no {match[1].removeprefix('inference.')}", fix


def _oneof(match: re.Match[str], found: str) -> tuple[str, str]:
    message = f"{match[1]!r} cannot stand beside {match[2]!r}"
    if "ensemble_scheduling" in (match[1], match[2]):
        return f"{message}: an ensemble only passes tensors on", "Batching belongs in the configs of its step models."
    return message, f"Keep one of the two: only one {match[3]} is possible."


def _expected(match: re.Match[str], found: str) -> tuple[str, str]:
    wanted = match[1]
    message = f"expected {wanted!r}, found {found}"
    if wanted == "{" and '"' in found[:2]:
        return message, 'A parameter\'s value is a message: value { string_value: "…" }.'
    if wanted == ",":
        return message, "Put a comma between the elements of a [ … ], and ] after the last one."
    if wanted == ":":
        return message, "A plain value follows its name with a colon: name: value."
    if found == "the end of the file":
        return message, "A bracket that was opened is never closed; look upwards from here."
    return message, f"Look for a missing {wanted!r} or one bracket too many just before this place."


Words = Callable[[re.Match[str], str], tuple[str, str]]
_WORDS: tuple[tuple[re.Pattern[str], str, Words], ...] = (
    (_UNKNOWN_ENUM, "unknown-value", _enum),
    (_ONEOF, "excluding-fields", _oneof),
    (_TWICE, "field-twice", lambda match, found: (f"{match[1]!r} is given twice", "Delete one of the two.")),
    (_EXPECTED, "syntax", _expected),
    (_NUMBER, "syntax", lambda match, found: (f"{match[1]!r} is no number that fits here", "Write a whole number.")),
    (_QUOTE, "syntax", lambda match, found: ("a string has no closing quote", 'Close it with " on the same line.')),
)
