"""The VAE for single pictures, trained as the 2-D network that it then is.

``AutoencoderKLQwenImage`` is made for video. Its causal convolutions put zeros before the first frame, so for a still
picture only the last slice of each kernel counts. Here that slice is a convolution of its own while it is trained; on
the way back the other slices are zero, which costs a compressed file nothing.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d, QwenImageRMS_norm
from torch import Tensor, nn


class StillConv(nn.Module):
    """One slice of a causal convolution, over [N, channels, 1, height, width]."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight[:, :, -1].detach().clone())
        self.bias = nn.Parameter(conv.bias.detach().clone())
        self._stride = conv.stride[1:]
        self._padding = (conv._padding[2], conv._padding[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x[:, :, 0], self.weight, self.bias, self._stride, self._padding).unsqueeze(2)


class StillNorm(nn.Module):
    """The VAE's norm over channels as one kernel, where it is seven: the same x / |x| · sqrt(channels) · gamma."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(norm.gamma.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        last = x.movedim(1, -1)  # contiguous: everything here is channels_last
        with torch.autocast(x.device.type, enabled=False):
            normed = F.rms_norm(last, last.shape[-1:], self.gamma.flatten().to(x.dtype), eps=1e-12)
        return normed.movedim(-1, 1)


class StillVae(nn.Module):
    """``vae`` with its causal convolutions and its norms replaced."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self._original = [copy.deepcopy(vae)]  # in a list: no part of this module
        self.vae = copy.deepcopy(vae)
        for parent in list(self.vae.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, QwenImageCausalConv3d):
                    setattr(parent, name, StillConv(child))
                elif isinstance(child, QwenImageRMS_norm):
                    setattr(parent, name, StillNorm(child))

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 3, H, W] in -1 … 1 → mean and log variance of the latents [N, z_dim, h, w]."""
        pictures = pictures.to(memory_format=torch.channels_last)
        moments = self.vae.quant_conv(self.vae.encoder(pictures.unsqueeze(2)))[:, :, 0]
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: Tensor) -> Tensor:
        """[N, z_dim, h, w] → [N, 3, H, W], not clamped."""
        latents = latents.to(memory_format=torch.channels_last)
        return cast(Tensor, self.vae.decoder(self.vae.post_quant_conv(latents.unsqueeze(2)))[:, :, 0])

    @torch.no_grad()
    def restored(self) -> Any:
        """The diffusers class with these weights, on the CPU."""
        vae = copy.deepcopy(self._original[0])
        ours = self.state_dict()
        weights = {}
        for name, value in vae.state_dict().items():
            slice_ = ours[f"vae.{name}"].to("cpu", value.dtype)
            if slice_.dim() == value.dim() - 1:
                whole = torch.zeros_like(value)
                whole[:, :, -1] = slice_
                slice_ = whole
            weights[name] = slice_
        vae.load_state_dict(weights)
        return vae.eval()
