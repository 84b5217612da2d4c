"""A handful of plain shapes as an icon set: what the smoke test trains on, where no package is at hand."""

from __future__ import annotations

from ditpack.demo_model.icons import FLAT, GLOSSY, Icon, svg

_BODIES = {
    "red-circle": '<circle cx="16" cy="16" r="14" fill="{0}"/>',
    "blue-square": '<rect x="3" y="3" width="26" height="26" fill="{1}"/>',
    "green-triangle": '<path d="M16 2 30 29H2z" fill="{2}"/>',
    "yellow-star": '<path d="m16 1 4 11h11l-9 7 4 12-10-7-10 7 4-12-9-7h11z" fill="{3}"/>',
    "purple-heart": '<path d="M16 30C-6 14 6-4 16 8c10-12 22 6 0 22z" fill="{4}"/>',
    "black-cross": '<path d="M11 2h10v9h9v10h-9v9H11v-9H2V11h9z" fill="{5}"/>',
}
_FILLS = {
    FLAT: ("#e02020", "#2050e0", "#20a040", "#f0c000", "#8030c0", "#202020"),
    GLOSSY: ("#f04848", "#5080ff", "#40d070", "#ffe040", "#b060f0", "#505050"),
}


def shape_icons() -> list[Icon]:
    """Six shapes in both styles."""
    return [
        Icon(name, style, svg(body.format(*fills), "0 0 32 32"))
        for style, fills in _FILLS.items()
        for name, body in _BODIES.items()
    ]
