"""Decoding equals diffusers' pipeline to the last bit of a pixel, from one thread or many."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ditpack.errors import GenerationFailed
from ditpack.models import vae as vae_module
from ditpack.models.checkpoint import CheckpointError, open_checkpoint
from ditpack.models.vae import VaeDecoder, load_vae_decoder

CPU = torch.device("cpu")
SHAPES = [(8, 8), (4, 6), (6, 4), (8, 8), (2, 10), (4, 6)]


@pytest.fixture
def latents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, *shape, generator=generator) for shape in SHAPES]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> VaeDecoder:
    return load_vae_decoder(open_checkpoint(tiny_checkpoint), CPU, torch.float32)


def pipeline_pixels(pipeline: Any, latents: torch.Tensor) -> Any:
    """The end of QwenImagePipeline.__call__: scale, decode, first frame, PIL image."""
    vae = pipeline.vae
    z = latents[None, :, None].to(vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(z.dtype)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(z.dtype)
    with torch.no_grad():
        image = vae.decode(z / inverse + mean, return_dict=False)[0][:, :, 0]
    return np.asarray(pipeline.image_processor.postprocess(image)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["tiny", "embedded"])
def test_equals_the_pipeline(
    tiny_checkpoint: Path, embedded_checkpoint: Path, latents: list[torch.Tensor], which: str, dtype: torch.dtype
) -> None:
    from diffusers import QwenImagePipeline

    path = tiny_checkpoint if which == "tiny" else embedded_checkpoint
    pipeline = QwenImagePipeline.from_pretrained(path, transformer=None, text_encoder=None, dtype=dtype)
    decoder = load_vae_decoder(open_checkpoint(path), CPU, dtype)
    for latent, image in zip(latents, [decoder.decode([latent])[0] for latent in latents], strict=True):
        assert image.dtype == np.uint8
        assert image.shape == (latent.shape[1] * 8, latent.shape[2] * 8, 3)
        expected = pipeline_pixels(pipeline, latent)
        assert expected.std() > 10  # a picture, not one colour
        assert np.array_equal(image, expected)


def test_together_or_alone_the_picture_is_the_same(tiny: VaeDecoder, latents: list[torch.Tensor]) -> None:
    together = tiny.decode(latents)
    for latent, image in zip(latents, together, strict=True):
        alone = tiny.decode([latent])[0]
        assert image.shape == alone.shape
        assert np.abs(image.astype(int) - alone.astype(int)).max() <= 1
    assert tiny.decode([]) == []


def test_equal_shapes_are_decoded_together_up_to_a_bound(
    tiny: VaeDecoder, latents: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, ...]] = []
    decode = tiny._decode_normalised

    def recording(z: torch.Tensor) -> torch.Tensor:
        batches.append(tuple(z.shape))
        return decode(z)

    monkeypatch.setattr(tiny, "_decode_normalised", recording)
    tiny.decode(latents)
    assert sorted(shape[0] for shape in batches) == [1, 1, 2, 2]
    batches.clear()
    monkeypatch.setattr(vae_module, "_BATCH_PIXELS", 64 * 64)
    tiny.decode([latents[0]] * 3)
    assert [shape[0] for shape in batches] == [1, 1, 1]


def test_threads_share_one_decoder(tiny: VaeDecoder, latents: list[torch.Tensor]) -> None:
    expected = [tiny.decode([latent])[0] for latent in latents]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for image, wanted in zip(
                pool.map(lambda z: tiny.decode([z])[0], latents, timeout=60), expected, strict=True
            ):
                assert np.array_equal(image, wanted)


def test_bad_latents(tiny: VaeDecoder, latents: list[torch.Tensor]) -> None:
    for wrong in (torch.zeros(15, 4, 4), torch.zeros(1, 16, 4, 4), torch.zeros(16, 0, 4)):
        with pytest.raises(ValueError, match=r"latents\[1\] has the shape"):
            tiny.decode([latents[0], wrong])
    broken = latents[0].clone()
    broken[3, 1, 1] = float("nan")
    with pytest.raises(GenerationFailed, match="not finite"):
        tiny.decode([broken])


def test_only_the_decoder_is_loaded(tiny_checkpoint: Path, tiny: VaeDecoder, tmp_path: Path) -> None:
    stored = load_file(tiny_checkpoint / "vae/diffusion_pytorch_model.safetensors")
    assert tiny.report.tensors == sum(not name.startswith(("encoder.", "quant_conv.")) for name in stored)
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = copy / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["decoder.conv_in.bias"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"vae: .*missing: decoder\.conv_in\.bias"):
        load_vae_decoder(open_checkpoint(copy), CPU, torch.float32)
