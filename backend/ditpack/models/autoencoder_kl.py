"""The decoding half of AutoencoderKL, inside a MammothModa2 checkpoint."""

from __future__ import annotations

import inspect
import logging

import torch
from diffusers import AutoencoderKL
from torch import nn

from ditpack.models.checkpoint import Checkpoint, CheckpointError
from ditpack.models.vae import VaeDecoder
from ditpack.models.weights import load_component

log = logging.getLogger(__name__)

_PREFIX = "gen_vae."


def load_vae_decoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> VaeDecoder:
    """Load the decoder of ``checkpoint``'s VAE onto ``device`` in ``dtype``; the encoder stays in the file.

    Raises:
        CheckpointError: an unknown key in gen_vae_config, or weights that do not fit it.
    """
    known = inspect.signature(AutoencoderKL.__init__).parameters
    for key in checkpoint.vae_config:
        if key not in known and not key.startswith("_"):
            raise CheckpointError(f"{checkpoint.path / 'config.json'}: gen_vae_config: {key}: unknown key")
    with torch.device("meta"):
        vae = AutoencoderKL.from_config(checkpoint.vae_config).eval()
    vae.encoder = nn.Identity()
    vae.quant_conv = nn.Identity() if vae.quant_conv is not None else None
    report = load_component(checkpoint, "", vae, device, dtype, rename=_decoder)
    log.info("gen_vae: %s", report)
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor

    def decode_batch(latents: torch.Tensor) -> torch.Tensor:
        latents = latents if scale is None else latents / scale
        latents = latents if shift is None else latents + shift
        image: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return image

    return VaeDecoder(decode_batch, vae.config.latent_channels, checkpoint.vae_scale_factor, report)


def _decoder(key: str) -> str | None:
    name = key.removeprefix(_PREFIX)
    return name if key.startswith(_PREFIX) and not name.startswith(("encoder.", "quant_conv.")) else None
