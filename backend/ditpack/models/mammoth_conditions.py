"""What the autoregressive stage of MammothModa2 hands over, and what of it the diffusion transformer is conditioned on.

Source: the reference pipeline's ``_split_ar_conditions``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ditpack.errors import InvalidRequest
from ditpack.models.mammoth_config import MammothModa2Config

Array = npt.NDArray[Any]


def split_conditions(
    hidden_states: Array, token_ids: Array, answer_start: int, config: MammothModa2Config
) -> tuple[Array, int]:
    """The states that condition the image: those of the question's text, then those of the answer's visual tokens.

    Args:
        hidden_states: fp32 [T, llm_hidden_size], the language model's last states of question and answer.
        token_ids: integers [T], the token of each state.
        answer_start: index of the answer's first token, 0 … T.

    Returns:
        The states [text + visual, llm_hidden_size], and how many of them are text.

    Raises:
        InvalidRequest: anything does not fit, or the answer has no visual token.
    """
    width = config.llm_hidden_size
    if hidden_states.ndim != 2 or hidden_states.shape[1] != width:
        raise InvalidRequest("HIDDEN_STATES", list(hidden_states.shape), f"must have shape [tokens, {width}]")
    tokens = len(hidden_states)
    if token_ids.shape != (tokens,):
        raise InvalidRequest("TOKEN_IDS", list(token_ids.shape), f"must have shape [{tokens}], as HIDDEN_STATES has")
    if not 0 <= answer_start <= tokens:
        raise InvalidRequest("ANSWER_START", answer_start, f"must be between 0 and {tokens}, the number of tokens")
    visual = token_ids >= config.visual_start
    question = np.arange(tokens) < answer_start
    text = question & ~visual & ~np.isin(token_ids, config.placeholder_ids)
    image = ~question & visual
    if not image.any():
        answer = token_ids[answer_start:].tolist()
        raise InvalidRequest(
            "TOKEN_IDS",
            answer,
            f"the answer, from ANSWER_START = {answer_start}, must have at least one visual token (ids from "
            f"{config.visual_start})",
        )
    config.context_tokens(int(text.sum()), int(image.sum()))
    conditions = np.concatenate((hidden_states[text], hidden_states[image]))
    if not np.isfinite(conditions).all():
        raise InvalidRequest("HIDDEN_STATES", conditions[~np.isfinite(conditions)][0].item(), "must be finite")
    return conditions, int(text.sum())
