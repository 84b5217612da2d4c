"""Qwen2.5-VL's language model as a text encoder, with its vision tower where the checkpoint edits images.

Its lm_head, and the vision tower of a checkpoint that makes images from text alone, stay in the file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint, CheckpointError
from ditpack.models.editing import Size
from ditpack.models.prompt import DROP, EDIT_DROP
from ditpack.models.vision import Pixels, VisionTower, image_runs, load_vision_tower, multimodal_positions
from ditpack.models.weights import LoadReport, load_component

log = logging.getLogger(__name__)


class TextEncoder:
    """Turns token ids into what the transformer reads; safe to call from several threads."""

    def __init__(
        self, model: Any, report: LoadReport, vision: VisionTower | None = None, image_token: int | None = None
    ) -> None:
        self._model = model
        self._vision = vision
        self._image_token = image_token
        self.report = report
        self.width: int = model.config.hidden_size

    @torch.inference_mode()
    def encode(
        self, input_ids: Sequence[Sequence[int]], images: Sequence[Sequence[Pixels]] | None = None
    ) -> list[torch.Tensor]:
        """Hidden states after the final norm, the positions of the template before the prompt left out.

        ``input_ids``: rows of any lengths, each the whole template as ``PromptTokenizer.encode`` gives it. ``images``:
        for each row, the images whose tokens are in it, as ``VisionTower.encode`` takes them; a row without image
        tokens takes no notice of its images.
        Returns one fp32 CPU tensor [L_i - DROP (or EDIT_DROP), width] a row, which does not depend on its neighbours.

        Raises:
            InvalidRequest: a row that is too short or too long, an id outside the vocabulary, or image tokens that are
                not those of the row's images.
        """
        if not input_ids:
            return []
        for row in input_ids:
            self._check(row)
        if self._vision is None or images is None:
            images = [()] * len(input_ids)
        runs = [image_runs(row, self._image_token) if self._image_token is not None else [] for row in input_ids]
        images = [row_images if row_runs else () for row_images, row_runs in zip(images, runs, strict=True)]
        # Attention is causal, so what stands to the right of a row's end cannot reach it: padding needs no mask.
        longest = max(len(row) for row in input_ids)
        ids = torch.zeros(len(input_ids), longest, dtype=torch.int64)
        positions = torch.zeros(3, len(input_ids), longest, dtype=torch.int64)
        for index, row in enumerate(input_ids):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
            grids = self._grids(images[index], runs[index])
            positions[:, index, : len(row)] = multimodal_positions(len(row), runs[index], grids)
        embeds = self._model.embed_tokens(ids.to(self.report.device))
        for index, features in enumerate(self._features(images)):
            for run, feature in zip(runs[index], features, strict=True):
                embeds[index, run] = feature.to(embeds.dtype)
        hidden = self._model(
            inputs_embeds=embeds, position_ids=positions.to(self.report.device), use_cache=False
        ).last_hidden_state.to(device="cpu", dtype=torch.float32)
        drops = [EDIT_DROP if row_runs else DROP for row_runs in runs]
        return [hidden[index, drops[index] : len(row)].clone() for index, row in enumerate(input_ids)]

    def _check(self, row: Sequence[int]) -> None:
        config = self._model.config
        drop = EDIT_DROP if self._image_token in row else DROP
        if not drop < len(row) <= config.max_position_embeddings:
            allowed = f"must have {drop + 1} to {config.max_position_embeddings} tokens"
            raise InvalidRequest("INPUT_IDS", f"{len(row)} tokens", allowed)
        if min(row) < 0 or max(row) >= config.vocab_size:
            raise InvalidRequest("INPUT_IDS", max(row), f"must be between 0 and {config.vocab_size - 1}")

    def _grids(self, images: Sequence[Pixels], runs: Sequence[slice]) -> list[Size]:
        grids = [self._vision.grid(image) for image in images] if self._vision else []
        tokens, expected = [run.stop - run.start for run in runs], [width * height for width, height in grids]
        if tokens != expected:
            raise InvalidRequest("INPUT_IDS", f"images of {tokens} tokens", f"must be {expected} for the images sent")
        return grids

    def _features(self, images: Sequence[Sequence[Pixels]]) -> list[list[torch.Tensor]]:
        """Each row's image features. Equal images are encoded once: a request's two branches have the same."""
        known: dict[tuple[tuple[int, ...], bytes], torch.Tensor] = {}

        def encode(image: Pixels) -> torch.Tensor:
            assert self._vision is not None
            key = (image.shape, image.tobytes())
            if key not in known:
                known[key] = self._vision.encode(image)
            return known[key]

        return [[encode(image) for image in row] for row in images]


def load_text_encoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load the language model of ``checkpoint``, and its vision tower if it edits, onto ``device`` in ``dtype``.

    Raises:
        CheckpointError: a config or weights that do not fit.
    """
    directory = checkpoint.path / "text_encoder"
    try:
        config = Qwen2_5_VLConfig.from_pretrained(directory, local_files_only=True).text_config
        with torch.device("meta"):
            model = Qwen2_5_VLTextModel._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / 'config.json'}: does not describe a Qwen2.5-VL text model: {error}"
        ) from error
    # No file holds the rotary frequencies: built again here, in fp32 and off the meta device.
    model.rotary_emb = type(model.rotary_emb)(config).to(device)
    report = load_component(checkpoint, "text_encoder", model, device, dtype, rename=_language_model)
    log.info("%s", report)
    vision = load_vision_tower(checkpoint, device, dtype)
    return TextEncoder(model, report, vision, checkpoint.text_encoder_config["image_token_id"] if vision else None)


def _language_model(key: str) -> str | None:
    """A stored name as the language model's own: "model." or "model.language_model." stands before it, by version."""
    if key == "lm_head.weight" or key.startswith(("visual.", "model.visual.")):
        return None
    return key.removeprefix("model.").removeprefix("language_model.")
