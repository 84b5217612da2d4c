"""Nouns that a text encoder takes for one another are found, parted, and trained on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from ditpack.demo_model.scenes import SceneMaker
from ditpack.demo_model.shapes import shape_icons
from ditpack.demo_model.train.confusion import Nouns
from ditpack.demo_model.train.names import FocusedScenes, NothingTrained, read
from ditpack.demo_model.train.networks import build_text_encoder, build_tokenizer
from ditpack.demo_model.train.presets import SMOKE
from ditpack.demo_model.words import synonyms

NAMES = ("toilet", "cloud", "pizza", "tornado", "red-apple")


@pytest.fixture
def nouns(tmp_path: Path) -> Nouns:
    """Of an encoder with random weights and a tokenizer that has each of the nouns' words as one token."""
    torch.manual_seed(0)
    words = " ".join(f"a toilet a loo a cloud a pizza a tornado a red apple {word}" for word in "ab")
    preset = dataclasses.replace(SMOKE, text=(*SMOKE.text[:-1], 1600))
    tokenizer = build_tokenizer(tmp_path / "tokenizer", [f" {words}"] * 50, preset)
    model = build_text_encoder(preset, tokenizer).model.language_model
    return Nouns(model, tokenizer.backend_tokenizer, NAMES)


def token_of(nouns: Nouns, *names: str) -> list[int]:
    return [token for token, of in nouns.whole.items() if of <= set(names)]


def test_an_encoder_that_tells_all_apart_is_left_alone(nouns: Nouns) -> None:
    assert nouns.confused().tokens == ()
    assert nouns.confused().names == frozenset()


def test_nouns_with_one_output_are_parted_and_no_other_is_touched(nouns: Nouns) -> None:
    weight = nouns.model.embed_tokens.weight
    (cloud,), (pizza,), (tornado,) = (token_of(nouns, name) for name in ("cloud", "pizza", "tornado"))
    with torch.no_grad():
        weight[pizza] = 1.001 * weight[cloud]
        weight[tornado] = weight[cloud]
    before = weight.detach().clone()
    found = nouns.confused()
    assert len(found.tokens) == 2
    assert set(found.tokens) < {cloud, pizza, tornado}
    assert found.names == {"cloud", "pizza", "tornado"}
    nouns.part(found.tokens)
    assert nouns.confused().tokens == ()
    rest = [token for token in range(len(weight)) if token not in found.tokens]
    torch.testing.assert_close(weight[rest], before[rest], rtol=0, atol=0)


def test_words_for_the_same_icon_may_come_out_alike(nouns: Nouns) -> None:
    assert "loo" in synonyms()["toilet"]
    first, second = token_of(nouns, "toilet")
    with torch.no_grad():
        nouns.model.embed_tokens.weight[first] = nouns.model.embed_tokens.weight[second]
    assert nouns.confused().tokens == ()


def test_scenes_have_the_names_in_question_more_often() -> None:
    icons = shape_icons()
    wanted = frozenset({icons[0].name})
    random, size = np.random.default_rng(0), (128, 128)

    def share(scenes: SceneMaker) -> float:
        drawn = [scenes.draw(random, size) for _ in range(300)]
        return float(np.mean([any(icons[icon].name in wanted for icon in scene.icons) for scene in drawn]))

    usual, focused = share(SceneMaker(icons)), share(FocusedScenes(icons, wanted))
    assert usual < 0.35
    assert focused > 0.45


def test_a_folder_without_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingTrained, match="which a training leaves"):
        read(tmp_path)
