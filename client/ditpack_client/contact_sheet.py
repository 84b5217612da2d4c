"""Many images on one page, each with its caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

_PAPER, _INK, _FAINT, _EDGE = "#f6f5f1", "#1d1d1b", "#6f6d66", "#d9d6cc"
_MARGIN, _GAP, _LINE = 40, 28, 1.3
_TITLE, _CAPTION, _DETAIL = 34, 19, 16  # font sizes, pixels

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, slots=True)
class Entry:
    """One image, its caption (wrapped to the image's column) and a smaller line below it."""

    image: Image.Image
    caption: str
    detail: str


def contact_sheet(
    entries: Sequence[Entry], *, title: str, subtitle: str = "", columns: int = 4, scale: int = 2
) -> Image.Image:
    """Lay ``entries`` out in rows of ``columns``, every image enlarged ``scale`` times so that sizes stay comparable.

    Raises:
        ValueError: when there are no entries.
    """
    if not entries:
        raise ValueError("a contact sheet needs at least one image")
    columns = min(columns, len(entries))
    column = max(entry.image.width for entry in entries) * scale
    caption_font, detail_font, title_font = (ImageFont.load_default(size) for size in (_CAPTION, _DETAIL, _TITLE))
    captions = [wrap(entry.caption, caption_font, column) for entry in entries]
    details = [wrap(entry.detail, detail_font, column) for entry in entries]
    width = 2 * _MARGIN + columns * column + (columns - 1) * _GAP
    heading = wrap(title, title_font, width - 2 * _MARGIN)
    below = wrap(subtitle, caption_font, width - 2 * _MARGIN)

    rows = [range(start, min(start + columns, len(entries))) for start in range(0, len(entries), columns)]
    picture = [max(entries[i].image.height for i in row) * scale for row in rows]
    text = [max(_height(captions[i], _CAPTION) + _height(details[i], _DETAIL) for i in row) + 10 for row in rows]
    head = _MARGIN + _height(heading, _TITLE) + _height(below, _CAPTION) + (_GAP if title or subtitle else 0)
    sheet = Image.new("RGB", (width, head + sum(picture) + sum(text) + _GAP * (len(rows) - 1) + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(sheet)
    y = _write(draw, _MARGIN, _MARGIN, heading, title_font, _TITLE, _INK)
    _write(draw, _MARGIN, y, below, caption_font, _CAPTION, _FAINT)

    top = head
    for row, picture_height, text_height in zip(rows, picture, text, strict=True):
        for place, i in enumerate(row):
            image = entries[i].image.convert("RGB")
            image = image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)
            x, y = _MARGIN + place * (column + _GAP), top + picture_height - image.height  # stand on one line
            sheet.paste(image, (x, y))
            draw.rectangle((x - 1, y - 1, x + image.width, y + image.height), outline=_EDGE)
            y = _write(draw, x, top + picture_height + 10, captions[i], caption_font, _CAPTION, _INK)
            _write(draw, x, y, details[i], detail_font, _DETAIL, _FAINT)
        top += picture_height + text_height + _GAP
    return sheet


def side_by_side(images: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    """``images`` in a row, as one, standing on one line."""
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    row = Image.new("RGB", (width, max(image.height for image in images)), _PAPER)
    left = 0
    for image in images:
        row.paste(image.convert("RGB"), (left, row.height - image.height))
        left += image.width + gap
    return row


def wrap(text: str, font: Font, width: int) -> list[str]:
    """``text`` in lines no wider than ``width`` pixels; a word that is wider is cut where it must be."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if font.getlength(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = ""
        for letter in word:
            if line and font.getlength(line + letter) > width:
                lines.append(line)
                line = ""
            line += letter
    return [*lines, line] if line else lines


def _height(lines: Sequence[str], size: int) -> int:
    return round(len(lines) * size * _LINE)


def _write(draw: ImageDraw.ImageDraw, x: int, y: int, lines: Sequence[str], font: Font, size: int, colour: str) -> int:
    for number, line in enumerate(lines):
        draw.text((x, y + round(number * size * _LINE)), line, font=font, fill=colour)
    return y + _height(lines, size)
