"""Answers of an autoregressive stage that never ran, and requests that use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ditpack.models.checkpoint import open_checkpoint
from ditpack.models.families import load_sampler
from ditpack.models.mammoth_conditions import split_conditions
from ditpack.models.mammoth_request import MammothRequest, resolve
from ditpack.models.tiny_mammoth import LLM_WIDTH
from ditpack.request import Limits
from ditpack.sampling.mammoth_moda2 import Conditioning, MammothModa2Sampler

VISUAL_START = 1000
LIMITS = Limits(default_width=64, default_height=64, min_size=32)


@dataclass(frozen=True)
class Answer:
    """What the autoregressive stage hands over."""

    states: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    start: int


def answer(text: int, visual: int, seed: int = 0) -> Answer:
    """``text`` question tokens and two vision placeholders, then ``visual`` visual tokens with line ends."""
    generator = np.random.default_rng(seed)
    question = [*range(1, text + 1), 903, 904]
    reply = [token for index in range(visual) for token in ([5] if index % 4 == 3 else []) + [VISUAL_START + index]]
    ids = np.array([*question, *reply, 6])
    states = generator.standard_normal((len(ids), LLM_WIDTH)).astype(np.float32)
    return Answer(states, ids, len(question))


def mammoth_sampler(checkpoint: Path) -> MammothModa2Sampler:
    sampler = load_sampler(open_checkpoint(checkpoint), torch.device("cpu"), torch.float32)
    assert isinstance(sampler, MammothModa2Sampler)
    return sampler


def mammoth_request(**changes: Any) -> MammothRequest:
    """A small resolved request; keyword arguments are its fields on the wire."""
    values = {"NUM_INFERENCE_STEPS": 4, "GUIDANCE_SCALE": 4.0, "SEED": 7}
    return resolve(values | {name.upper(): value for name, value in changes.items()}, LIMITS)


def conditioning(sampler: MammothModa2Sampler, given: Answer) -> Conditioning:
    states, text_tokens = split_conditions(given.states, given.ids, given.start, sampler.config)
    return Conditioning(torch.from_numpy(states), text_tokens)


def mixed() -> list[tuple[MammothRequest, Answer]]:
    """Eight requests that differ in all that may differ."""
    sizes = [(64, 64), (32, 96), (96, 32), (48, 80), (64, 64), (112, 64), (32, 32), (64, 96)]
    ranges = [(0, 1), (0.25, 0.75), (0, 0.5), (0.5, 1), (0.3, 0.3), (0, 0), (0.9, 1), (0, 1)]
    guidance = [4.0, 9.0, 7.3, 3.0, 5.0, 2.0, 4.0, 1.0]
    return [
        (
            mammoth_request(
                width=sizes[i][0],
                height=sizes[i][1],
                num_inference_steps=(5, 8, 6, 4, 10, 3, 7, 5)[i],
                guidance_scale=guidance[i],
                cfg_range=ranges[i],
                seed=i,
            ),
            answer(text=(5, 1, 12, 0, 8, 3, 20, 6)[i], visual=(3, 30, 7, 1, 12, 64, 2, 9)[i], seed=i),
        )
        for i in range(8)
    ]
