"""One image that was made, and how to keep it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

METADATA_KEY = "parameters"
_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


@dataclass(frozen=True)
class ImageResult:
    """One image with what made it.

    Attributes:
        image: the picture, RGB.
        seed: the seed used, drawn by the server where none was sent.
        info: what the server says of the request: ``request`` (every setting, defaults filled in), times, ``steps``,
            ``pack`` (how much of the engine's work was shared).
        data: the encoded file as the server sent it; empty for the format "raw".
        output_format: "png", "jpeg", "webp" or "raw".
        model: the Triton model that made it; a stream's is that of an image without one.
        request_id: the id that the request was sent with.
    """

    image: Image.Image
    seed: int
    info: dict[str, Any]
    data: bytes
    output_format: str
    model: str
    request_id: str = ""

    @property
    def queue_ms(self) -> float:
        """Milliseconds between admission and the first step."""
        return self._milliseconds("queue_ms")

    @property
    def encode_ms(self) -> float:
        """Milliseconds of text encoding."""
        return self._milliseconds("encode_ms")

    @property
    def denoise_ms(self) -> float:
        """Milliseconds between the first step and the last."""
        return self._milliseconds("denoise_ms")

    @property
    def decode_ms(self) -> float:
        """Milliseconds between latents and pixels."""
        return self._milliseconds("decode_ms")

    @property
    def steps(self) -> int:
        """Denoising steps run."""
        return int(self.info.get("steps", 0))

    @property
    def shared_steps(self) -> int:
        """Denoising steps that ran in one pack with other requests."""
        return int(self.info.get("pack", {}).get("shared_steps", 0))

    def settings(self) -> dict[str, Any]:
        """Everything needed to make this image again; what PNG files carry."""
        request = self.info.get("request", {})
        return {
            "prompt": request.get("prompt"),
            **({"references": request["references"]} if request.get("references") else {}),
            "negative_prompt": request.get("negative_prompt"),
            "size": f"{self.image.width}x{self.image.height}",
            "num_inference_steps": request.get("num_inference_steps"),
            "true_cfg_scale": request.get("true_cfg_scale"),
            "seed": self.seed,
            "model": self.model,
            "version": _version(),
        }

    def save(self, path: str | Path, *, metadata: bool = True) -> None:
        """Write the image in the format that ``path``'s suffix names (.png, .jpg, .jpeg, .webp).

        PNG files carry ``settings()`` as a JSON text chunk named "parameters", unless ``metadata`` is false. JPEG and
        WebP files never carry it: they are written as the server encoded them, not encoded a second time.

        Raises:
            ValueError: for another suffix.
            OSError: when the file cannot be written.
        """
        path = Path(path)
        kind = file_format(path)
        if kind == "png":
            chunks = PngInfo()
            if metadata:
                chunks.add_text(METADATA_KEY, json.dumps(self.settings(), ensure_ascii=False))
            self.image.save(path, format="PNG", pnginfo=chunks)
        elif kind == self.output_format:
            path.write_bytes(self.data)
        else:
            self.image.save(path, format=kind, quality=95)

    def _milliseconds(self, name: str) -> float:
        return float(self.info.get(name, 0.0))


def file_format(path: Path) -> str:
    """The format that a file name asks for: "png", "jpeg" or "webp". Raises ValueError for any other suffix."""
    try:
        return _FORMATS[path.suffix.lower()]
    except KeyError:
        raise ValueError(f"{path.name!r} names no image format; known are {', '.join(_FORMATS)}") from None


def read_settings(path: str | Path) -> dict[str, Any] | None:
    """The settings that ``ImageResult.save`` put into a PNG file, or None where there are none."""
    with Image.open(path) as image:
        text = image.info.get(METADATA_KEY)
    return None if text is None else dict(json.loads(text))


def _version() -> str:
    try:
        return version("ditpack")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"
