"""Which file an image is written to: two images of one run never share a name."""

from __future__ import annotations

import re
from pathlib import Path

from ditpack_client.result import file_format

FIELDS = ("{index}", "{prompt}", "{seed}")
_FIELD = re.compile(r"\{[^{}]*\}")
_SUFFIX = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
_SLUG_CHARACTERS = 48


class Naming:
    """Turns ``-o`` and ``--format`` into one path an image.

    ``output`` None or a directory names files after prompt and seed and leaves existing files alone. Anything else is a
    file name, in which {index}, {prompt} and {seed} are filled in; it replaces what is there. A plain file name for
    several images gets "-{index}" before its suffix.

    Raises:
        ValueError: saying what is wrong with the two.
    """

    def __init__(self, output: str | None, output_format: str | None, count: int) -> None:
        self._digits = len(str(count))
        self._taken: set[Path] = set()
        self.replaces = not (output is None or output.endswith("/") or Path(output).is_dir())
        if self.replaces:
            self.directory, name = Path(output or "").parent, Path(output or "").name
        else:
            self.directory, name = Path(output or "."), "{prompt}-{seed}"
        self.output_format = output_format or (file_format(Path(name)) if Path(name).suffix else "png")
        if not Path(name).suffix:
            name += _SUFFIX[self.output_format]
        if file_format(Path(name)) != self.output_format:
            raise ValueError(f"the file name {name!r} is not {self.output_format}, which --format asks for")
        fields = _FIELD.findall(name)
        unknown = [found for found in fields if found not in FIELDS]
        if unknown:
            raise ValueError(f"the file name {name!r} has the field {unknown[0]}; known are {', '.join(FIELDS)}")
        if count > 1 and not fields:
            name = f"{Path(name).stem}-{{index}}{Path(name).suffix}"
        self._name = name

    def path(self, index: int, prompt: str, seed: int) -> Path:
        """The file for the image at ``index`` (from 1), taken from now on."""
        values = {"{index}": str(index).zfill(self._digits), "{prompt}": slug(prompt), "{seed}": str(seed)}
        wanted = self.directory / _FIELD.sub(lambda field: values[field[0]], self._name)
        path, number = wanted, 2
        while path in self._taken or (not self.replaces and path.exists()):
            path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
            number += 1
        self._taken.add(path)
        return path


def slug(prompt: str) -> str:
    """``prompt`` as a short file name: its words, joined by "-"."""
    words = re.findall(r"\w+", prompt.lower())
    text = ""
    for word in words:
        if text and len(text) + 1 + len(word) > _SLUG_CHARACTERS:
            break
        text = f"{text}-{word}" if text else word[:_SLUG_CHARACTERS]
    return text or "image"


def preview_name(index: int, count: int, prompt: str, step: int) -> str:
    """The file name of a preview of the image at ``index`` (from 1) of ``count``. Its seed is not known yet."""
    number = f"{str(index).zfill(len(str(count)))}-" if count > 1 else ""
    return f"{number}{slug(prompt)}-{step:03d}.jpg"
