"""Edits of the model repository that change nothing for its clients, drawn at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from ditpack.tritonserver.launch.repository import model_names


def read(directory: Path) -> Any:
    return text_format.Parse((directory / "config.pbtxt").read_text(), ModelConfig())


def write(directory: Path, config: Any) -> None:
    (directory / "config.pbtxt").write_text(text_format.MessageToString(config))


def rewire(config: Any, draw: random.Random) -> None:
    """New names for an ensemble's inner tensors, its steps, inputs and outputs in another order."""
    steps = config.ensemble_scheduling.step
    outer = {tensor.name for tensor in [*config.input, *config.output]}
    inner = sorted({name for step in steps for name in step.output_map.values()} - outer)
    # Names that other tensors had are fine too.
    names = dict(
        zip(inner, draw.sample([*inner, *(f"t_{draw.randrange(10**6)}" for _ in inner)], len(inner)), strict=True)
    )
    for step in steps:
        for mapping in (step.input_map, step.output_map):
            for key, value in dict(mapping).items():
                mapping[key] = names.get(value, value)
    for field in (steps, config.input, config.output):
        shuffled = draw.sample(list(field), len(field))
        del field[:]
        field.extend(shuffled)


def rebatch(config: Any, draw: random.Random) -> None:
    """Other values for a step model's batching, all in range."""
    config.max_batch_size = draw.randint(1, 128)
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = draw.randrange(10_000)
    del batching.preferred_batch_size[:]
    batching.preferred_batch_size.extend(
        draw.sample(range(1, config.max_batch_size + 1), min(2, config.max_batch_size))
    )
    batching.priority_levels = draw.randint(1, 5)
    batching.default_priority_level = draw.randint(1, batching.priority_levels)
    policy = batching.default_queue_policy
    policy.max_queue_size = draw.randint(1, 4096)
    policy.default_timeout_microseconds = draw.randint(1000, 10**9)
    batching.priority_queue_policy[draw.randint(1, batching.priority_levels)].CopyFrom(policy)


def vary(repository: Path, seed: int) -> None:
    """Edit every model of ``repository``."""
    draw = random.Random(seed)
    for name in model_names(repository):
        config = read(repository / name)
        (rewire if config.platform == "ensemble" else rebatch)(config, draw)
        write(repository / name, config)
