"""The one place where model families are named."""

from __future__ import annotations

import logging

import torch

from ditpack.attention import select_attention
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.quantized import quantize_blocks
from ditpack.models.qwen_image import QwenImageConfig, QwenImageTransformer, stored_name
from ditpack.models.weights import load_component
from ditpack.sampling.flow_match import FlowMatchSchedule
from ditpack.sampling.qwen_image import QwenImageSampler

logger = logging.getLogger(__name__)


class UnusableError(ValueError):
    """``setting`` (attention or quantization) asks for what this device cannot do."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(reason)
        self.setting = setting


def load_sampler(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    quantization: str = "none",
) -> QwenImageSampler:
    """The sampler of ``checkpoint`` with its weights on ``device`` in ``dtype``; ``quantization`` is none or fp8.

    Raises:
        CheckpointError: the weights do not fit the config.
        UnusableError: ``attention`` or ``quantization`` is not usable here.
    """
    config = QwenImageConfig.from_config(checkpoint.transformer_config)
    if quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UnusableError("quantization", "fp8 needs a GPU of compute capability 8.9 or above")
    try:
        varlen = select_attention(attention, device, dtype, config.num_attention_heads, config.attention_head_dim)
    except ValueError as error:
        raise UnusableError("attention", str(error)) from error
    with torch.device("meta"):
        transformer = QwenImageTransformer(config, varlen)
    report = load_component(checkpoint, "transformer", transformer, device, dtype, rename=stored_name)
    logger.info("transformer: %s", report)
    if quantization == "fp8":
        quantize_blocks(transformer.transformer_blocks)
        logger.info("transformer: the linear layers of its blocks are fp8 now")
    return QwenImageSampler(
        transformer.eval().requires_grad_(False),
        FlowMatchSchedule.from_config(checkpoint.scheduler_config),
        checkpoint.vae_scale_factor * config.patch_size,
        graphs=device.type == "cuda" and varlen.reads_cu_seqlens,
    )
