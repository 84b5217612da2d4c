"""MammothModa2's resolver, what it takes from an answer of the autoregressive stage, and what its config may say."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mammoth_tools import LIMITS, VISUAL_START, Answer, answer

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import CheckpointError, open_checkpoint
from ditpack.models.config_rules import Config
from ditpack.models.mammoth_conditions import split_conditions
from ditpack.models.mammoth_config import MammothModa2Config
from ditpack.models.mammoth_request import FIELDS, MammothRequest, resolve
from ditpack.models.tiny_mammoth import LLM_WIDTH, tiny_mammoth_config
from ditpack.request import Limits, resolve_json


def read(config: dict[str, Any]) -> MammothModa2Config:
    return MammothModa2Config.read(Config(Path("checkpoint/config.json"), config))


CONFIG = read(tiny_mammoth_config())


# The resolver.


def test_nothing_is_needed() -> None:
    request = resolve({}, Limits(default_width=1024, default_height=1024))
    assert (request.width, request.height, request.num_inference_steps) == (1024, 1024, 50)
    assert (request.guidance_scale, request.cfg_range) == (9.0, (0.0, 1.0))


EXTRA = {"text_guidance_scale": 2.5, "cfg_range": [0.1, 0.2], "num_inference_steps": 11}
SENT = {"GUIDANCE_SCALE": 3.5, "CFG_RANGE": [0.3, 0.4], "NUM_INFERENCE_STEPS": 12}
SUGGESTED = {"text_guidance_scale": [4.5], "cfg_range": [0.5, 0.6], "num_inference_steps": [13]}


def knobs(request: MammothRequest) -> tuple[float, tuple[float, float], int]:
    return request.guidance_scale, request.cfg_range, request.num_inference_steps


def test_precedence() -> None:
    """EXTRA_ARGS, then the field itself, then what the autoregressive stage suggests, then the default."""
    extra, suggested = {"EXTRA_ARGS": json.dumps(EXTRA)}, {"ADDITIONAL_INFORMATION": json.dumps(SUGGESTED)}
    assert knobs(resolve({**extra, **SENT, **suggested}, LIMITS)) == (2.5, (0.1, 0.2), 11)
    assert knobs(resolve({**SENT, **suggested}, LIMITS)) == (3.5, (0.3, 0.4), 12)
    assert knobs(resolve(suggested, LIMITS)) == (4.5, (0.5, 0.6), 13)
    assert knobs(resolve({}, LIMITS)) == (9.0, (0.0, 1.0), 50)


def test_precedence_is_decided_setting_by_setting() -> None:
    values = {
        "EXTRA_ARGS": json.dumps({"cfg_range": [0.1, 0.2], "text_guidance_scale": None}),
        "GUIDANCE_SCALE": 3.5,
        "ADDITIONAL_INFORMATION": json.dumps({"num_inference_steps": 13, "text_guidance_scale": 4.5}),
    }
    assert knobs(resolve(values, LIMITS)) == (3.5, (0.1, 0.2), 13)


BAD: list[tuple[str, Any, str]] = [
    ("WIDTH", 0, "must be between 32"),
    ("HEIGHT", 72, "must be a multiple of 16"),
    ("NUM_INFERENCE_STEPS", 0, "must be between 1 and 200"),
    ("GUIDANCE_SCALE", float("nan"), "must be a finite number of at least 0"),
    ("GUIDANCE_SCALE", -1.0, "must be a finite number of at least 0"),
    ("GUIDANCE_SCALE", "4", "must be a number"),
    ("CFG_RANGE", [0.5], "must be two numbers with 0 <= first <= second <= 1"),
    ("CFG_RANGE", [0.1, 0.2, 0.3], "must be two numbers"),
    ("CFG_RANGE", [0.5, 0.4], "must be two numbers"),
    ("CFG_RANGE", [-0.1, 1], "must be two numbers"),
    ("CFG_RANGE", [0, 1.01], "must be two numbers"),
    ("CFG_RANGE", [0, float("nan")], "must be two numbers"),
    ("CFG_RANGE", ["0", 1], "must be two numbers"),
    ("CFG_RANGE", 0.5, "must be two numbers"),
    ("EXTRA_ARGS", "[1]", "must be a JSON object"),
    ("EXTRA_ARGS", "{", "must be a JSON object"),
    ("EXTRA_ARGS", b"\xff", "must be valid UTF-8"),
    ("EXTRA_ARGS", '{"seed": 3}', "unknown key; known are cfg_range, num_inference_steps, num_outputs_per_prompt"),
    ("EXTRA_ARGS", '{"num_outputs_per_prompt": 2}', "num_outputs_per_prompt = 2: must be 1"),
    ("EXTRA_ARGS", '{"num_inference_steps": 0}', "NUM_INFERENCE_STEPS = 0"),
    ("EXTRA_ARGS", '{"cfg_range": "all"}', "CFG_RANGE = 'all'"),
    ("ADDITIONAL_INFORMATION", '{"full_token_ids": []}', "unknown key"),
    ("ADDITIONAL_INFORMATION", '{"text_guidance_scale": [1, 2]}', r"GUIDANCE_SCALE = \[1, 2\]: must be a number"),
    ("SEED", -1, "must be between 0 and"),
    ("OUTPUT_FORMAT", "gif", "must be one of"),
    ("RESPONSE_FORMAT", "url", "must be one of"),
    ("DEADLINE_MS", 0, "must be between 1 and"),
    ("PRIORITY", 4, "must be between 1 and 3"),
    ("PROMPT", "a cat", "unknown field"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD)
def test_bad_values_are_named(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=allowed):
        resolve({field: value}, LIMITS)


def test_every_field_has_a_bad_value_above() -> None:
    assert {field for field, *_ in BAD} >= set(FIELDS)


def test_admission_and_execution_agree() -> None:
    """What mammoth_prepare resolved, mammoth_dit resolves to the same, and both refuse the same."""
    values = {**SENT, "EXTRA_ARGS": json.dumps(EXTRA), "WIDTH": 96, "SEED": 2**63 - 1, "DEADLINE_MS": 900}
    request = resolve(values, LIMITS)
    assert resolve_json(request.to_json(), LIMITS, resolve) == request
    for change in ({"cfg_range": [0.5, 0.4]}, {"guidance_scale": -1}, {"width": 72}, {"num_inference_steps": 0}):
        with pytest.raises(InvalidRequest, match=next(iter(change)).upper()):
            resolve_json(json.dumps({**json.loads(request.to_json()), **change}), LIMITS, resolve)


def test_guidance_by_step() -> None:
    def active(scale: float, cfg_range: list[float], steps: int = 10) -> list[int]:
        values = {"GUIDANCE_SCALE": scale, "CFG_RANGE": cfg_range, "NUM_INFERENCE_STEPS": steps}
        request = resolve(values, LIMITS)
        return [step for step in range(steps) if request.guided_at(step)]

    assert active(2, [0.3, 0.7]) == [3, 4, 5, 6, 7]
    assert active(2, [0, 1]) == list(range(10))
    assert active(2, [0, 0]) == [0]
    assert active(2, [0.91, 1]) == []
    assert active(1, [0, 1]) == []
    assert active(0.5, [0, 1]) == []


# The answer.


def refuse(given: Answer, match: str, config: MammothModa2Config = CONFIG) -> None:
    with pytest.raises(InvalidRequest, match=match):
        split_conditions(given.states, given.ids, given.start, config)


def test_text_of_the_question_and_visual_tokens_of_the_answer() -> None:
    ids = np.array([1, 901, 2, 902, VISUAL_START, 903, 904, 3, 4, VISUAL_START + 5, 901, VISUAL_START, 999])
    states = np.arange(len(ids) * LLM_WIDTH, dtype=np.float32).reshape(len(ids), LLM_WIDTH)
    chosen, text_tokens = split_conditions(states, ids, 8, CONFIG)
    assert text_tokens == 3
    assert chosen[:, 0].tolist() == [index * LLM_WIDTH for index in (0, 2, 7, 9, 11)]


def test_a_question_without_text() -> None:
    chosen, text_tokens = split_conditions(answer(0, 3).states, answer(0, 3).ids, 2, CONFIG)
    assert (len(chosen), text_tokens) == (3, 0)


def test_answers_that_do_not_fit() -> None:
    good = answer(5, 3)
    refuse(Answer(good.states[0], good.ids, good.start), r"HIDDEN_STATES = \[24\]: must have shape \[tokens, 24\]")
    refuse(Answer(good.states[:, :-1], good.ids, good.start), r"HIDDEN_STATES = \[11, 23\]")
    refuse(Answer(good.states, good.ids[:-1], good.start), r"TOKEN_IDS = \[10\]: must have shape \[11\]")
    refuse(Answer(good.states, good.ids, -1), "ANSWER_START = -1: must be between 0 and 11")
    refuse(Answer(good.states, good.ids, 12), "ANSWER_START = 12")
    refuse(Answer(good.states, good.ids, 11), "must have at least one visual token")
    refuse(Answer(good.states, np.minimum(good.ids, 999), good.start), r"visual token \(ids from 1000\)")
    refuse(Answer(good.states[:0], good.ids[:0], 0), "at least one visual token")
    refuse(answer(193, 1), "200 tokens of conditioning.*must not exceed 199")
    bad = good.states.copy()
    bad[2, 3] = np.inf
    refuse(Answer(bad, good.ids, good.start), "HIDDEN_STATES = inf: must be finite")
    bad[2, 3], bad[6, 0] = 0, np.nan  # a placeholder's state is never used
    split_conditions(bad, good.ids, good.start, CONFIG)


# The config.


@pytest.mark.parametrize(
    ("parent", "nested", "expected"),
    [(7, None, 7), (None, 8, 8), (7, 8, 7), (None, None, 152064)],
    ids=["llm_config", "text_config", "llm_config wins", "default"],
)
def test_the_visual_threshold_by_level(parent: int | None, nested: int | None, expected: int) -> None:
    config = tiny_mammoth_config()
    config["llm_config"]["gen_vocab_start_index"] = parent
    config["llm_config"]["text_config"]["gen_vocab_start_index"] = nested
    assert read(config).visual_start == expected


def changed(path: str, value: Any) -> dict[str, Any]:
    config = deepcopy(tiny_mammoth_config())
    *parents, key = path.split("/")
    place = config
    for parent in parents:
        place = place[parent]
    place[key] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "qwen2", r'config\.json: model_type = \'qwen2\': must be "mammothmoda2"'),
        ("gen_condition_mode", "text", "gen_condition_mode = 'text'"),
        ("gen_condition_layers", [3], "gen_condition_layers = .*unknown key"),
        ("gen_dit_config", None, "gen_dit_config = None: must be an object"),
        ("gen_dit_config/qk_norm", True, "gen_dit_config: qk_norm = True: unknown key; known are axes_dim_rope"),
        ("gen_dit_config/patch_size", 4, "patch_size = 4: must be 2"),
        ("gen_dit_config/num_kv_heads", 2, "num_kv_heads = 2: must divide num_attention_heads = 3"),
        ("gen_dit_config/num_layers", 0, "num_layers = 0: must be a positive integer"),
        ("gen_dit_config/norm_eps", "small", "norm_eps = 'small': must be a positive number"),
        ("gen_dit_config/out_channels", 8, "out_channels = 8: must be null or in_channels = 4"),
        ("gen_axes_dim_rope", [4, 4, 4], "must be three even numbers that add up to 16"),
        ("gen_axes_dim_rope", [8, 8], "must have 3 entries, has 2"),
        ("gen_image_condition_refiner_config/queries", 5, "refiner_config: queries = 5: unknown key"),
        ("gen_image_condition_refiner_config/num_queries", 0, "num_queries = 0: must be a positive integer"),
        ("llm_config/gen_vocab_start_index", "many", "gen_vocab_start_index = 'many'.*must be a positive integer"),
        ("gen_image_condition_refiner_config/norm_eps", 0, "norm_eps = 0: must be a positive number"),
        ("llm_config/text_config", {}, "hidden_size = None"),
        ("llm_config/text_config", [], r"text_config = \[\]: must be an object"),
    ],
)
def test_a_config_that_cannot_be_served(path: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(changed(path, value))


def test_what_other_stages_say_is_left_alone() -> None:
    read(changed("gen_transport_config", {"snr_type": "lognorm"}))
    read(changed("transformers_version", "5.0"))
    assert read(changed("gen_dit_config/norm_eps", None)).norm_eps == 1e-5
    assert read(changed("gen_image_condition_refiner_config", None)).refiner is None
    assert read(changed("llm_config/hidden_size", 99)).llm_hidden_size == 99


def test_the_defaults_are_the_published_numbers() -> None:
    config = read(
        {
            "model_type": "mammothmoda2",
            "llm_config": {"hidden_size": 3584},
            "gen_dit_config": {},
            "gen_vae_config": {},
            "gen_axes_dim_rope": [32, 32, 32],
        }
    )
    assert config == MammothModa2Config(axes_lens=(10000, 10000, 10000), refiner=None)
    assert (config.head_dim, config.ffn_dim(2304), config.time_dim) == (96, 9216, 1024)


def test_opening_a_checkpoint(mammoth_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(mammoth_checkpoint)
    assert (checkpoint.family, checkpoint.vae_scale_factor) == ("mammothmoda2", 8)
    assert checkpoint.limits(2**20) == Limits(64, 64, size_multiple=16, min_size=32, max_pixels=2**20)
    copy = shutil.copytree(mammoth_checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["gen_vae_config"]["latent_channels"] = 5
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gen_vae_config: latent_channels = 5: must be in_channels = 4"):
        open_checkpoint(copy)


def test_random_weights_need_no_more_than_the_config(mammoth_checkpoint: Path, tmp_path: Path) -> None:
    import torch

    from ditpack.models.families import load_sampler, load_vae_decoder

    shutil.copy(mammoth_checkpoint / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="must hold one"):
        open_checkpoint(tmp_path, weights="stored")
    checkpoint = open_checkpoint(tmp_path, weights="random")
    sampler = load_sampler(checkpoint, torch.device("cpu"), torch.float32)
    member = sampler.begin(*sampler.example(16))
    sampler.step(sampler.pack([member]))
    (image,) = load_vae_decoder(checkpoint, torch.device("cpu"), torch.float32).decode([sampler.finish(member)()])
    assert image.shape == (64, 64, 3)


def test_an_unknown_key_of_the_vae_is_an_error(mammoth_checkpoint: Path, tmp_path: Path) -> None:
    import torch

    from ditpack.models.families import load_vae_decoder

    copy = shutil.copytree(mammoth_checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["gen_vae_config"]["flavour"] = 1
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="gen_vae_config: flavour: unknown key"):
        load_vae_decoder(open_checkpoint(copy), torch.device("cpu"), torch.float32)
