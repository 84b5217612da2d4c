"""What every test shares: no network, one thread, and the checkpoints that tests run on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before anything imports a Hugging Face library: tests must not reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("DITPACK_CHECKPOINT", None)

import pytest
import torch

from ditpack.models.checkpoint import EMBEDDED

torch.set_num_threads(1)  # what tests run is small; on a busy machine a second thread makes it many times slower


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the real classes; read it, never change it (copy it first)."""
    from ditpack.models.tiny import write_tiny_checkpoint

    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_edit_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Qwen-Image-Edit: one reference image."""
    return _tiny_edit(tmp_path_factory, "tiny-edit", pipeline="QwenImageEditPipeline")


@pytest.fixture(scope="session")
def tiny_edit_2509_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Qwen-Image-Edit-2509: up to three reference images."""
    return _tiny_edit(tmp_path_factory, "tiny-edit-2509", pipeline="QwenImageEditPlusPipeline")


@pytest.fixture(scope="session")
def tiny_edit_2511_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of Qwen-Image-Edit-2511: up to three reference images, ``zero_cond_t``."""
    return _tiny_edit(tmp_path_factory, "tiny-edit-2511", pipeline="QwenImageEditPlusPipeline", zero_cond_t=True)


def _tiny_edit(tmp_path_factory: pytest.TempPathFactory, name: str, **options: Any) -> Path:
    from ditpack.models.tiny import write_tiny_checkpoint

    directory = tmp_path_factory.mktemp("checkpoints") / name
    write_tiny_checkpoint(directory, **options)
    return directory


@pytest.fixture(scope="session")
def mammoth_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random MammothModa2 as the Preview is, with a refiner of its own; read it, never change it."""
    from ditpack.models.tiny_mammoth import write_tiny_mammoth_checkpoint

    directory = tmp_path_factory.mktemp("checkpoints") / "tiny-mammoth"
    write_tiny_mammoth_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def mammoth_dev_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as the Dev is, with the refiner inside the transformer."""
    from ditpack.models.tiny_mammoth import write_tiny_mammoth_checkpoint

    directory = tmp_path_factory.mktemp("checkpoints") / "tiny-mammoth-dev"
    write_tiny_mammoth_checkpoint(directory, nested=True)
    return directory


@pytest.fixture(scope="session")
def embedded_checkpoint() -> Path:
    """The trained checkpoint inside the package; read it, never change it."""
    return EMBEDDED
