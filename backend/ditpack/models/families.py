"""The one place where model families are named."""

from __future__ import annotations

import logging

import torch

from ditpack.attention import select_attention
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.qwen_image import QwenImageConfig, QwenImageTransformer, stored_name
from ditpack.models.weights import load_into
from ditpack.sampling.flow_match import FlowMatchSchedule
from ditpack.sampling.qwen_image import QwenImageSampler

logger = logging.getLogger(__name__)


def load_sampler(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, attention: str = "auto"
) -> QwenImageSampler:
    """The sampler of ``checkpoint`` with its weights on ``device`` in ``dtype``.

    Raises:
        CheckpointError: the weights do not fit the config.
        ValueError: ``attention`` is not usable here.
    """
    config = QwenImageConfig.from_config(checkpoint.transformer_config)
    varlen = select_attention(attention, device, dtype, config.num_attention_heads, config.attention_head_dim)
    with torch.device("meta"):
        transformer = QwenImageTransformer(config, varlen)
    report = load_into(transformer, checkpoint.path / "transformer", device, dtype, rename=stored_name)
    logger.info("transformer: %s", report)
    schedule = FlowMatchSchedule.from_config(checkpoint.scheduler_config)
    pixels_per_patch = checkpoint.vae_scale_factor * config.patch_size
    return QwenImageSampler(
        transformer.eval().requires_grad_(False),
        schedule,
        pixels_per_patch,
        graphs=device.type == "cuda" and varlen.reads_cu_seqlens,
    )
