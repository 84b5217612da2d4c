"""Qwen2.5-VL's language model as a text encoder. Its vision tower and its lm_head stay in the file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint, CheckpointError
from ditpack.models.prompt import DROP
from ditpack.models.weights import LoadReport, load_component

log = logging.getLogger(__name__)


class TextEncoder:
    """Turns token ids into what the transformer reads; safe to call from several threads."""

    def __init__(self, model: Any, report: LoadReport) -> None:
        self._model = model
        self.report = report
        self.width: int = model.config.hidden_size

    @torch.inference_mode()
    def encode(self, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Hidden states after the final norm, the template's first ``DROP`` positions left out.

        ``input_ids``: rows of any lengths, each the whole template as ``PromptTokenizer.encode`` gives it.
        Returns one fp32 CPU tensor [L_i - DROP, width] a row. A row's result does not depend on its neighbours' ids.

        Raises:
            InvalidRequest: a row that is too short or too long, or an id outside the vocabulary.
        """
        if not input_ids:
            return []
        config = self._model.config
        for row in input_ids:
            if not DROP < len(row) <= config.max_position_embeddings:
                allowed = f"must have {DROP + 1} to {config.max_position_embeddings} tokens"
                raise InvalidRequest("INPUT_IDS", f"{len(row)} tokens", allowed)
            if min(row) < 0 or max(row) >= config.vocab_size:
                raise InvalidRequest("INPUT_IDS", max(row), f"must be between 0 and {config.vocab_size - 1}")
        # Attention is causal, so what stands to the right of a row's end cannot reach it: padding needs no mask.
        longest = max(len(row) for row in input_ids)
        ids = torch.zeros(len(input_ids), longest, dtype=torch.int64)
        for index, row in enumerate(input_ids):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        hidden = self._model(input_ids=ids.to(self.report.device), use_cache=False).last_hidden_state
        hidden = hidden[:, DROP:].to(device="cpu", dtype=torch.float32)
        return [hidden[index, : len(row) - DROP].clone() for index, row in enumerate(input_ids)]


def load_text_encoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load the language model of ``checkpoint`` onto ``device`` in ``dtype``.

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
    return TextEncoder(model, report)


def _language_model(key: str) -> str | None:
    """A stored name as the language model's own: "model." or "model.language_model." stands before it, by version."""
    if key == "lm_head.weight" or key.startswith(("visual.", "model.visual.")):
        return None
    return key.removeprefix("model.").removeprefix("language_model.")
