"""What training computes in dense batches is what serving computes: the same text, pictures, velocities and latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import reference_forward, relative_error

from ditpack.demo_model.icons import rasterise
from ditpack.demo_model.scenes import SceneMaker
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.train.batched_dit import dit_layout, velocity
from ditpack.demo_model.train.batched_text import encode_pictures, encode_text
from ditpack.demo_model.train.export import export
from ditpack.demo_model.train.networks import build_text_encoder, build_tokenizer, build_transformer, build_vae
from ditpack.demo_model.train.pool import Pool, pack
from ditpack.demo_model.train.presets import SMOKE
from ditpack.demo_model.train.still_vae import StillVae
from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.prompt import DROP, EDIT_DROP, PromptTokenizer
from ditpack.models.text_encoder import load_text_encoder
from ditpack.models.tiny import randomise
from ditpack.models.vae_encoder import load_vae_encoder
from ditpack.sampling.latents import pack_latents

CPU = torch.device("cpu")


class Fresh:
    """A model of the smoke preset with random weights, as training holds it and as an exported checkpoint."""

    def __init__(self, directory: Path) -> None:
        icons = shape_icons()
        self.tokenizer = build_tokenizer(
            directory / "tokenizer", ["a red circle on a blue background, flat style"], SMOKE
        )
        self.vae, self.dit = build_vae(SMOKE), build_transformer(SMOKE)
        self.text_encoder = build_text_encoder(SMOKE, self.tokenizer)
        generator = torch.Generator().manual_seed(0)
        for part in (self.vae, self.dit, self.text_encoder):
            randomise(part, generator)
            part.float().requires_grad_(False).eval()
        self.still = StillVae(self.vae)
        statistics = ([0.1] * 16, [1.3] * 16)
        self.pool = Pool(
            SMOKE,
            SceneMaker(icons),
            rasterise(icons, 64),
            self.still,
            statistics,
            self.tokenizer,
            self.text_encoder.config,
        )
        vae = self.still.restored()
        vae.register_to_config(latents_mean=statistics[0], latents_std=statistics[1])
        self.path = directory / "checkpoint"
        export(self.path, SMOKE, vae, self.dit, self.text_encoder, self.tokenizer, {})
        self.checkpoint = open_checkpoint(str(self.path))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    return Fresh(tmp_path_factory.mktemp("fresh"))


@pytest.mark.parametrize("shape", [((96, 64), 0), ((64, 64), 1), ((64, 64), 2)])
@torch.no_grad()
def test_text_of_a_batch_is_what_the_server_encodes(shape: Any, fresh: Fresh) -> None:
    """Token ids, positions, the vision tower and the language model, against the classes that serve them."""
    entries, layouts = fresh.pool.entries[shape].rows(torch.arange(3)), fresh.pool.layouts[shape]
    model, features = fresh.text_encoder.model, None
    if layouts.rotary is not None:
        patches = fresh.pool.features_input(entries.pictures.flatten(0, 1))
        features = encode_pictures(model.visual, patches, *layouts.rotary)
        features = features.unflatten(0, entries.pictures.shape[:2]).flatten(1, 2)
    ours = encode_text(model.language_model, entries.ids, layouts.text, features)

    encoder = load_text_encoder(fresh.checkpoint, CPU, torch.float32)
    prefix = layouts.text.prefix.tolist()
    assert len(prefix) == (EDIT_DROP if shape[1] else DROP)
    rows = [[*prefix, *ids[:length].tolist()] for ids, length in zip(entries.ids, entries.lengths, strict=True)]
    expected = encoder.encode(rows, [list(pictures.numpy()) for pictures in entries.pictures])
    for row, theirs in enumerate(expected):
        assert relative_error(ours[row, : len(theirs)], theirs) < 1e-5


def test_token_ids_are_the_servers(fresh: Fresh) -> None:
    tokenizer = PromptTokenizer(fresh.checkpoint)
    for shape in (((64, 64), 0), ((64, 64), 2)):
        layouts = fresh.pool.layouts[shape]
        ids, length = layouts.empty
        tokens = 2 * 2  # a picture of 64 x 64 has 2 x 2 tokens of 32 pixels
        expected = tokenizer.encode(" ", image_tokens=[tokens] * shape[1])
        assert [*layouts.text.prefix.tolist(), *ids[:length].tolist()] == expected


@torch.no_grad()
def test_velocity_is_that_of_diffusers(fresh: Fresh) -> None:
    generator = torch.Generator().manual_seed(1)
    grids = [(4, 6), (4, 4), (4, 4)]
    image = torch.randn(2, 24 + 32, 64, generator=generator)
    text = torch.randn(2, 9, 32, generator=generator)
    sigmas, keep = torch.tensor([0.9, 0.2]), torch.tensor([9, 5])
    ours = velocity(fresh.dit, image, text, keep, sigmas, dit_layout(SMOKE.axes, grids, 9, CPU))
    for row in range(2):
        expected = reference_forward(fresh.dit, image[row], text[row, : keep[row]], float(sigmas[row]), grids)
        assert relative_error(ours[row], expected) < 1e-5
    assert (
        relative_error(ours[1], reference_forward(fresh.dit, image[1], text[1], 0.2, grids)) > 1e-3
    )  # padding matters


@torch.no_grad()
def test_the_still_vae_is_the_vae(fresh: Fresh) -> None:
    generator = torch.Generator().manual_seed(2)
    pictures = torch.randn(2, 3, 32, 48, generator=generator).clamp(-1, 1)
    restored = fresh.still.restored()
    posterior = fresh.vae.encode(pictures[:, :, None]).latent_dist
    mean, log_variance = fresh.still.encode(pictures)
    assert relative_error(mean, posterior.mean[:, :, 0]) < 1e-5
    assert relative_error(log_variance, posterior.logvar[:, :, 0]) < 1e-5
    assert relative_error(restored.encode(pictures[:, :, None]).latent_dist.mean[:, :, 0], mean) < 1e-5
    decoded = restored.decode(posterior.mean).sample[:, :, 0]
    assert relative_error(fresh.still.decode(posterior.mean[:, :, 0]).clamp(-1, 1), decoded) < 1e-5
    assert restored.decoder.conv_in.weight[:, :, :-1].abs().sum() == 0


@torch.no_grad()
def test_latents_of_the_pool_are_the_servers(fresh: Fresh) -> None:
    """From pixels: the same mode, normalised and packed as ``vae_encoder`` does for pictures to edit."""
    pixels = np.random.default_rng(3).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    pictures = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    ours = pack((fresh.still.encode(pictures)[0] - 0.1) / 1.3)
    expected = load_vae_encoder(fresh.checkpoint, CPU, torch.float32).encode(list(pixels))
    for row, theirs in enumerate(expected):
        assert relative_error(ours[row], theirs) < 1e-5
    assert torch.equal(pack(pictures.repeat(1, 2, 1, 1))[1], pack_latents(pictures[1].repeat(2, 1, 1)))
