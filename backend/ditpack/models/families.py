"""The one place where model families are named. Nothing here imports torch before a family is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ditpack import request
from ditpack.models import mammoth_request
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.editing import EDITING_FAMILIES
from ditpack.request import Resolver

if TYPE_CHECKING:
    import torch

    from ditpack.models.vae import VaeDecoder
    from ditpack.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Family:
    """What a family brings: its resolver, and "module:function" of what loads its sampler and its image decoder.

    ``planner``: of what makes a sampler without weights, for a family that can run on several devices.
    """

    resolver: Resolver[Any]
    sampler: str
    vae_decoder: str
    planner: str | None = None


_QWEN_IMAGE = Family(
    request.resolve,
    "ditpack.sampling.qwen_image:load_sampler",
    "ditpack.models.vae:load_vae_decoder",
    planner="ditpack.sampling.qwen_image:plan_sampler",
)
# By what ``Checkpoint.family`` calls them.
FAMILIES: Mapping[str, Family] = {
    "QwenImagePipeline": _QWEN_IMAGE,
    **dict.fromkeys(EDITING_FAMILIES, _QWEN_IMAGE),
    "mammothmoda2": Family(
        mammoth_request.resolve,
        "ditpack.sampling.mammoth_moda2:load_sampler",
        "ditpack.models.autoencoder_kl:load_vae_decoder",
    ),
}


class UnusableError(ValueError):
    """``setting`` (attention or quantization) asks for what this device or model cannot do."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(reason)
        self.setting = setting


def load_sampler(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    quantization: str = "none",
) -> Sampler[Any, Any]:
    """The sampler of ``checkpoint`` with its weights on ``device`` in ``dtype``; ``quantization`` is none or fp8.

    Raises:
        CheckpointError: the weights do not fit the config.
        UnusableError: ``attention`` or ``quantization`` is not usable here.
    """
    return _function(FAMILIES[checkpoint.family].sampler)(checkpoint, device, dtype, attention, quantization)


def plan_sampler(checkpoint: Checkpoint) -> Sampler[Any, Any]:
    """A sampler of ``checkpoint`` without weights: it knows rows and examples, and cannot take a step.

    Raises:
        UnusableError: the family runs on one device only.
    """
    planner = FAMILIES[checkpoint.family].planner
    if planner is None:
        raise UnusableError("devices", f"a {checkpoint.family} runs on one device")
    return _function(planner)(checkpoint)


def load_vae_decoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> VaeDecoder:
    """The image decoder of ``checkpoint`` on ``device`` in ``dtype``.

    Raises:
        CheckpointError: the weights do not fit the config.
    """
    return _function(FAMILIES[checkpoint.family].vae_decoder)(checkpoint, device, dtype)


def _function(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
