"""Where each field of a text-format protobuf stands.

protobuf's parser keeps no positions. This reads a text that the parser has accepted once more, with protobuf's own
tokenizer, so there is nothing to validate here and no value to convert: only the nesting is followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.protobuf import text_format

_CLOSING = {"{": "}", "<": ">"}
_QUOTES = ("'", '"')


@dataclass(slots=True)
class Node:
    """One field's value. ``line`` and ``column`` (from 1) are those of its name, or of itself inside a ``[...]``.

    ``text`` is a scalar as it is written, without quotes; ``fields`` are a message's, each with all its occurrences.
    """

    line: int
    column: int
    text: str = ""
    fields: dict[str, list[Node]] = field(default_factory=dict)

    def at(self, *path: str | int) -> Node:
        """The node below that ``path`` leads to, as far as it is written: what was left out has its parent's place."""
        node = self
        children: list[Node] = []
        for part in path:
            if isinstance(part, str):
                children = node.fields.get(part, [])
                if not children:
                    return node
                node = children[0]
            elif part < len(children):
                node = children[part]
        return node

    def entry(self, name: str, key: str) -> Node:
        """The last entry of the map ``name`` whose key is ``key`` (the last is the one that counts)."""
        entries = [node for node in self.fields.get(name, ()) if node.at("key").text == key]
        return entries[-1] if entries else self


def locate(text: str) -> Node:
    """The tree of ``text``, a message that ``text_format.Parse`` accepts (unknown fields or not)."""
    tokenizer = text_format.Tokenizer(text.splitlines())
    root = Node(1, 1)
    _message(tokenizer, root, "")
    return root


def _message(tokenizer: Any, into: Node, closing: str) -> None:
    while not tokenizer.AtEnd() and tokenizer.token != closing:
        line, column = _position(tokenizer)
        name = tokenizer.token
        tokenizer.NextToken()
        tokenizer.TryConsume(":")
        occurrences = into.fields.setdefault(name, [])
        if tokenizer.TryConsume("["):
            while not tokenizer.AtEnd() and not tokenizer.TryConsume("]"):
                occurrences.append(_value(tokenizer, *_position(tokenizer)))
                tokenizer.TryConsume(",")
        else:
            occurrences.append(_value(tokenizer, line, column))
        tokenizer.TryConsume(",") or tokenizer.TryConsume(";")


def _value(tokenizer: Any, line: int, column: int) -> Node:
    node = Node(line, column)
    closing = _CLOSING.get(tokenizer.token)
    if closing is not None:
        tokenizer.NextToken()
        _message(tokenizer, node, closing)
        tokenizer.TryConsume(closing)
        return node
    if tokenizer.token.startswith(_QUOTES):
        node.text = tokenizer.ConsumeString()  # adjacent literals are one string
        return node
    if tokenizer.TryConsume("-"):
        node.text = "-"
    node.text += tokenizer.token
    tokenizer.NextToken()
    return node


def _position(tokenizer: Any) -> tuple[int, int]:
    here = tokenizer.ParseError("")  # the public way to ask a tokenizer where it is
    return here.GetLine(), here.GetColumn()
