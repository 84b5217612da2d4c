"""Previews: a linear map from latents to colour, near what the decoder makes of them, as a small JPEG."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from ditpack.models import preview
from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_vae_decoder
from ditpack.models.preview import PreviewMaker, fit, project


class LinearDecoder:
    """Decodes each latent pixel to ``scale_factor`` squared pixels of a colour that is linear in it."""

    z_dim, scale_factor = 4, 8
    colours = torch.tensor([[20.0, 0, 5], [0, 15.0, 0], [3, 3, 12.0], [-9, 4, 0], [120, 130, 110]])

    def decode(self, latents: list[torch.Tensor]) -> list:
        small = [project(each, self.colours) for each in latents]
        return [each.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy() for each in small]


def test_the_fit_finds_a_map_that_is_there() -> None:
    found = fit(LinearDecoder())
    assert torch.allclose(found, LinearDecoder.colours, atol=0.5), "within the rounding to whole levels"


def test_projection() -> None:
    latents = torch.zeros(4, 2, 3)
    latents[0, 1, 2] = 1
    pixels = project(latents, LinearDecoder.colours)
    assert (pixels.shape, pixels.dtype) == ((2, 3, 3), torch.uint8)
    assert pixels[0, 0].tolist() == [120, 130, 110]
    assert pixels[1, 2].tolist() == [140, 130, 115]
    assert project(latents + 1000, LinearDecoder.colours).max() == 255, "clamped, not wrapped around"


@pytest.mark.parametrize(
    ("height", "width", "size"), [(8, 8, (64, 64)), (4, 12, (192, 64)), (128, 96, (96, 128)), (1, 1, (64, 64))]
)
def test_a_preview_is_a_small_jpeg(tiny_checkpoint: Path, height: int, width: int, size: tuple[int, int]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    z_dim = load_vae_decoder(checkpoint, torch.device("cpu"), torch.float32).z_dim
    text = PreviewMaker(checkpoint)(torch.randn(z_dim, height, width))
    image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
    assert (image.format, image.size) == ("JPEG", size)


def test_the_map_is_made_once_for_all_threads(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    monkeypatch.setattr(preview, "load_vae_decoder", lambda *_: LinearDecoder())
    monkeypatch.setattr(preview, "fit", lambda decoder: fits.append(1) or LinearDecoder.colours)
    make = PreviewMaker(open_checkpoint(tiny_checkpoint))
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(make, [torch.zeros(4, 8, 8)] * 16))
    assert len(fits) == len(made) == 1
