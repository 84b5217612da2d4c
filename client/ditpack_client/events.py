"""What a stream tells of one image while it is made."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from ditpack_client.result import ImageResult


@dataclass(frozen=True)
class Queued:
    """Not begun. ``position`` counts those waiting for the engine, from 1; None while it is not known."""

    id: str
    position: int | None


@dataclass(frozen=True)
class Step:
    """``step`` of ``steps`` are done; ``remaining_s`` is the server's estimate. Fast steps may be skipped."""

    id: str
    step: int
    steps: int
    seconds_per_step: float
    remaining_s: float


@dataclass(frozen=True)
class Preview:
    """A small picture of what the image is going to be, after ``step`` of ``steps``; ``data`` is it as a JPEG file."""

    id: str
    step: int
    steps: int
    image: Image.Image
    data: bytes


@dataclass(frozen=True)
class Retrying:
    """The server answered UNAVAILABLE for ``reason``; in ``seconds`` the request is sent again, from its beginning."""

    id: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class Finished:
    """The last event."""

    id: str
    result: ImageResult


Event = Queued | Step | Preview | Retrying | Finished
