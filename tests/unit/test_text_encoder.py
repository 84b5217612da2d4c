"""The text encoder equals diffusers' ``encode_prompt``, keeps rows apart and leaves the vision tower in the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import CheckpointError, open_checkpoint
from ditpack.models.prompt import DROP, PromptTokenizer
from ditpack.models.text_encoder import TextEncoder, load_text_encoder

CPU = torch.device("cpu")
PROMPTS = ["a red kite", " ", "\n🪁 é", "two green trees on a purple background " * 12]


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def parts(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, embedded_checkpoint: Path
) -> tuple[TextEncoder, PromptTokenizer, Any]:
    from diffusers import QwenImagePipeline

    path = tiny_checkpoint if request.param == "tiny" else embedded_checkpoint
    checkpoint = open_checkpoint(path)
    pipeline = QwenImagePipeline.from_pretrained(path, transformer=None, vae=None, dtype=torch.float32)
    return load_text_encoder(checkpoint, CPU, torch.float32), PromptTokenizer(checkpoint), pipeline


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> tuple[TextEncoder, PromptTokenizer]:
    checkpoint = open_checkpoint(tiny_checkpoint)
    return load_text_encoder(checkpoint, CPU, torch.float32), PromptTokenizer(checkpoint)


def test_equals_encode_prompt(parts: tuple[TextEncoder, PromptTokenizer, Any]) -> None:
    encoder, tokenizer, pipeline = parts
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for prompt, row, together in zip(PROMPTS, ids, encoder.encode(ids), strict=True):
        with torch.no_grad():
            expected, mask = pipeline.encode_prompt(prompt, device=CPU)
        assert mask is None
        assert together.shape == (len(row) - DROP, encoder.width) == expected[0].shape
        assert together.dtype == torch.float32
        assert expected.std() > 0.3  # the comparisons below are about numbers of order 1
        assert (encoder.encode([row])[0] - expected[0]).abs().max() <= 1e-6
        # Among rows of other lengths the matrix products are blocked differently: equal to fp32 rounding.
        assert (together - expected[0]).abs().max() <= 1e-6 * expected.abs().max()


def test_a_neighbours_ids_change_nothing(tiny: tuple[TextEncoder, PromptTokenizer]) -> None:
    encoder, tokenizer = tiny
    mine = tokenizer.encode("a red kite")
    long, short = tokenizer.encode("1" * 150), tokenizer.encode("x")
    first = encoder.encode([long, mine, short])[1]
    changed = [(token * 7 + 1) % 400 for token in long]
    second = encoder.encode([changed, mine, [token // 2 for token in short]])[1]
    assert torch.equal(first, second)
    assert not torch.equal(encoder.encode([long])[0], encoder.encode([changed])[0])


def test_the_prompt_matters(tiny: tuple[TextEncoder, PromptTokenizer]) -> None:
    encoder, tokenizer = tiny
    kite, tree = encoder.encode([tokenizer.encode("a kite"), tokenizer.encode("a tree")])
    assert (kite[-1] - tree[-1]).norm() > 0.05 * kite[-1].norm()


def test_bf16(tiny_checkpoint: Path, tiny: tuple[TextEncoder, PromptTokenizer]) -> None:
    encoder, tokenizer = tiny
    half = load_text_encoder(open_checkpoint(tiny_checkpoint), CPU, torch.bfloat16)
    assert half.report.bytes * 2 == encoder.report.bytes
    ids = [tokenizer.encode("a red kite on a blue sky")]
    exact, rounded = encoder.encode(ids)[0], half.encode(ids)[0]
    assert rounded.dtype == torch.float32
    assert (exact - rounded).norm() < 0.05 * exact.norm()


def test_no_vision_tower_and_no_lm_head(tiny: tuple[TextEncoder, PromptTokenizer]) -> None:
    names = [name for name, _ in tiny[0]._model.named_parameters()]
    assert names
    assert not any("visual" in name or "lm_head" in name for name in names)


def test_bad_rows_are_refused(tiny: tuple[TextEncoder, PromptTokenizer]) -> None:
    encoder, tokenizer = tiny
    good = tokenizer.encode("a red kite")
    for row in ([], good[:DROP], [*good, 512], [*good, -1], good + [1] * 2048):
        with pytest.raises(InvalidRequest, match="INPUT_IDS"):
            encoder.encode([good, row])
    assert encoder.encode([]) == []


@pytest.mark.parametrize("layout", ["model.", "model.language_model."])
def test_both_layouts_of_names_and_an_untied_head(
    tiny_checkpoint: Path, tmp_path: Path, tiny: tuple[TextEncoder, PromptTokenizer], layout: str
) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = copy / "text_encoder/model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if "visual." in name:
            tensors[("model.visual." if "language" in layout else "visual.") + name.partition("visual.")[2]] = tensor
        else:
            tensors[layout + name.removeprefix("model.").removeprefix("language_model.")] = tensor
    tensors["lm_head.weight"] = torch.zeros(512, 32)
    save_file(tensors, file)
    ids = [tiny[1].encode("a red kite")]
    assert torch.equal(
        load_text_encoder(open_checkpoint(copy), CPU, torch.float32).encode(ids)[0], tiny[0].encode(ids)[0]
    )


def test_missing_and_unexpected_weights_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = copy / "text_encoder/model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("1.self_attn.q_proj.bias"))
    del tensors[gone]
    save_file(tensors | {"adapter.weight": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError) as caught:
        load_text_encoder(open_checkpoint(copy), CPU, torch.float32)
    assert "missing: layers.1.self_attn.q_proj.bias" in str(caught.value)
    assert "unexpected: adapter.weight" in str(caught.value)


def test_a_config_transformers_refuses_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = copy / "text_encoder/config.json"
    config = json.loads(file.read_text())
    config["text_config"]["num_attention_heads"] = 5
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"text_encoder/config\.json"):
        load_text_encoder(open_checkpoint(copy), CPU, torch.float32)
