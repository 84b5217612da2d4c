"""The committed model repository: configs that parse, wiring that fits, doors that stay thin."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from fake_triton import EDIT_MODELS, MAMMOTH_MODELS, MODELS, REPOSITORY, read_config, triton_args
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from ditpack import request
from ditpack.models import mammoth_request
from ditpack.models.families import FAMILIES
from ditpack.tritonserver import parameters
from ditpack.tritonserver.parameters import Instance, ParameterError

ENSEMBLES = {"qwen_image": MODELS, "qwen_image_edit": EDIT_MODELS, "mammoth_moda2": MAMMOTH_MODELS}
SETTINGS = {
    "prepare": parameters.PrepareSettings,
    "prepare_edit": parameters.PrepareEditSettings,
    "vae_encoder": parameters.VaeEncoderSettings,
    "text_encoder": parameters.TextEncoderSettings,
    "dit": parameters.DitSettings,
    "vae_decoder": parameters.VaeDecoderSettings,
    "mammoth_prepare": parameters.MammothPrepareSettings,
    "mammoth_dit": parameters.DitSettings,
    "mammoth_vae_decoder": parameters.VaeDecoderSettings,
    "control": parameters.ControlSettings,
    "qwen_image_stream": parameters.StreamSettings,
}
BATCHED = [
    model for model in SETTINGS if model not in ("control", "qwen_image_stream")
]  # those have no steps of theirs


def test_the_repository_holds_the_models_and_nothing_else() -> None:
    assert sorted(path.name for path in REPOSITORY.iterdir()) == sorted([*SETTINGS, *ENSEMBLES])
    for ensemble in ENSEMBLES:
        assert (REPOSITORY / ensemble / "1" / ".gitkeep").exists(), "git drops empty directories, Triton needs 1/"


@pytest.mark.parametrize("model", SETTINGS)
def test_doors_are_thin(model: str) -> None:
    assert len((REPOSITORY / model / "1" / "model.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("model", SETTINGS)
def test_a_door_imports_in_the_stub_that_only_reads_the_config(model: str) -> None:
    """That stub has no TritonError, Tensor, … in pb_utils yet, and importing torch there would cost seconds a model."""
    code = f"""
import sys, types, importlib.util
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
spec = importlib.util.spec_from_file_location("1.model", {str(REPOSITORY / model / "1" / "model.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.TritonPythonModel
heavy = {{"torch", "transformers", "diffusers", "tokenizers", "pydantic"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("model", BATCHED)
def test_nothing_needs_a_gpu(model: str) -> None:
    config = read_config(model)
    assert config.max_batch_size > 0
    kinds = [ModelInstanceGroup.Kind.Name(group.kind) for group in config.instance_group]
    assert kinds == ["KIND_CPU" if "prepare" in model else "KIND_AUTO"]


@pytest.mark.parametrize("model", BATCHED)
def test_triton_hands_bursts_over_at_once(model: str) -> None:
    """With a queue policy or priorities Triton looks for a free instance when a request comes, else every 500 ms."""
    config = read_config(model)
    assert config.HasField("dynamic_batching")
    assert not config.dynamic_batching.HasField("default_queue_policy")
    assert not config.dynamic_batching.priority_levels


@pytest.mark.parametrize("dit", ["dit", "mammoth_dit"])
def test_engines_take_turns(dit: str) -> None:
    """Of a burst that Triton hands over in one call, one engine gets all and the others nothing."""
    assert read_config(dit).max_batch_size == 1


def test_variable_shapes_do_not_split_batches() -> None:
    for model in BATCHED:
        for tensor in read_config(model).input:
            assert tensor.allow_ragged_batch == (-1 in tensor.dims), f"{model}.{tensor.name}"


@pytest.mark.parametrize("model", SETTINGS)
def test_the_parameters_in_the_config_are_all_there_are_and_the_defaults(model: str) -> None:
    kind = SETTINGS[model]
    instance = Instance.from_args(triton_args(model))
    assert set(instance.config.get("parameters", {})) == {field.name for field in dataclasses.fields(kind)}
    assert instance.settings(kind) == kind()


@pytest.mark.parametrize(("name", "models"), ENSEMBLES.items())
def test_the_ensemble_fits_its_steps(name: str, models: tuple[str, ...]) -> None:
    """Triton's own rules: names exist, types and dims are equal, every tensor has one producer and is used."""
    ensemble = read_config(name)
    assert {step.model_name for step in ensemble.ensemble_scheduling.step} == set(models)
    assert ensemble.max_batch_size == 0
    scope: dict[str, tuple[Any, ...]] = {t.name: (t.data_type, *t.dims) for t in ensemble.input}
    optional = {t.name for t in ensemble.input if t.optional}
    used: set[str] = set()
    for step in ensemble.ensemble_scheduling.step:
        model = read_config(step.model_name)
        inputs = {t.name: t for t in model.input}
        outputs = {t.name: t for t in model.output}
        assert set(step.input_map) <= set(inputs), step.model_name
        left_out = set(inputs) - set(step.input_map)  # what only edits have, and they have all of it
        assert all(inputs[key].optional for key in left_out)
        assert not left_out or name == "qwen_image"
        for key, value in step.input_map.items():
            assert scope[value] == (inputs[key].data_type, *inputs[key].dims), f"{step.model_name}.{key}"
            assert value not in optional or inputs[key].optional, f"{step.model_name}.{key}"
            used.add(value)
        for key, value in step.output_map.items():
            # Triton loads an ensemble whose step writes an ensemble input, and then ignores what the step wrote.
            assert value not in scope, f"{value} has two producers"
            scope[value] = (outputs[key].data_type, *outputs[key].dims) if value else ()
            if value.isupper():
                used.add(value)
    declared = {t.name: (t.data_type, *t.dims) for t in ensemble.output}
    assert declared == {name: scope[name] for name in declared}
    assert set(declared) == {"IMAGE", "PIXELS", "SEED_USED", "INFO"}
    assert used == set(scope)


@pytest.mark.parametrize(
    ("ensemble", "prepare", "fields"),
    [
        ("qwen_image", "prepare", request.FIELDS),
        ("mammoth_moda2", "mammoth_prepare", (*mammoth_request.STATES, *mammoth_request.FIELDS)),
    ],
)
def test_the_wire_has_the_resolvers_fields(ensemble: str, prepare: str, fields: tuple[str, ...]) -> None:
    assert sorted(t.name for t in read_config(prepare).input) == sorted(fields)
    assert [(t.name, t.data_type, t.dims, t.optional) for t in read_config(ensemble).input] == [
        (t.name, t.data_type, t.dims, t.optional) for t in read_config(prepare).input
    ]


def test_the_stream_has_the_ensembles_fields_and_previews() -> None:
    stream, ensemble = read_config("qwen_image_stream"), read_config("qwen_image")
    assert stream.parameters["ensemble"].string_value == "qwen_image"
    assert stream.parameters["family"].string_value == ensemble.parameters["family"].string_value
    assert stream.model_transaction_policy.decoupled
    *same, previews = [(t.name, t.data_type, t.dims, t.optional) for t in stream.input]
    fields = [(t.name, t.data_type, t.dims, t.optional or t.name == "PROMPT") for t in ensemble.input]
    assert same == fields, "that PROMPT is missing is for prepare to say"
    assert (previews[0], previews[3]) == ("PREVIEW_EVERY", True)
    outputs = {t.name: (t.data_type, t.dims) for t in ensemble.output}
    assert {t.name: (t.data_type, t.dims) for t in stream.output if t.name != "EVENT"} == {
        name: value for name, value in outputs.items() if name != "PIXELS"
    }


def test_an_edit_has_the_same_fields_behind_its_images() -> None:
    for model in ("prepare_edit", "qwen_image_edit"):
        images, *rest = read_config(model).input
        assert images.name == "IMAGES"
        assert [(t.name, t.data_type, t.optional) for t in rest] == [
            (t.name, t.data_type, t.optional) for t in read_config("prepare").input
        ]


def test_every_family_has_an_ensemble_and_every_ensemble_a_family() -> None:
    served = [read_config(ensemble).parameters["family"].string_value.split() for ensemble in ENSEMBLES]
    assert all(served)
    assert {family for families in served for family in families} == set(FAMILIES)


@pytest.mark.parametrize(
    ("model", "name", "value", "allowed"),
    [
        ("prepare", "max_pixels", "many", "must be an integer from 4096 to 67108864"),
        ("prepare", "max_prompt_tokens", "0", "must be an integer from 1 to 32768"),
        ("prepare", "token_budget", "4096", "unknown parameter; known are checkpoint, max_pixels, max_prompt_tokens"),
        ("text_encoder", "dtype", "float16", "must be one of auto, bfloat16, float32"),
        ("dit", "token_budget", "-1", "or auto"),
        ("dit", "max_queue_size", "1.5", "must be an integer from 0 to 65536"),
        ("dit", "max_queue_size", "auto", "must be an integer from 0 to 65536"),
        ("dit", "queue_timeout_s", "nan", "must be a number from 0.1 to 86400.0"),
        ("dit", "checkpoint", "  ", "must not be blank"),
        ("vae_decoder", "Dtype", "auto", "unknown parameter"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(model: str, name: str, value: str, allowed: str) -> None:
    instance = Instance.from_args(triton_args(model, {name: value}))
    with pytest.raises(ParameterError) as error:
        instance.settings(SETTINGS[model])
    assert f"model '{model}': parameter {name} = {value!r}: " in str(error.value)
    assert allowed in str(error.value)


def test_parameters_are_typed() -> None:
    given = {"token_budget": "8192", "max_queue_size": "3", "queue_timeout_s": "1.5", "checkpoint": " /models/x "}
    settings = Instance.from_args(triton_args("dit", given)).settings(parameters.DitSettings)
    assert (settings.token_budget, settings.max_queue_size, settings.queue_timeout_s) == (8192, 3, 1.5)
    assert settings.checkpoint == "/models/x"


def test_the_device_is_the_one_triton_gives() -> None:
    assert Instance.from_args(triton_args("dit")).device == "cpu"
    assert Instance.from_args(triton_args("dit", kind="GPU", device=3)).device == "cuda:3"
    with pytest.raises(ParameterError, match=r"KIND_MODEL.*must be KIND_AUTO, KIND_GPU or KIND_CPU"):
        Instance.from_args(triton_args("dit", kind="MODEL"))


def test_a_gpu_that_torch_cannot_use_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    instance = Instance.from_args(triton_args("dit", kind="GPU"))
    with pytest.raises(ParameterError, match="install a CUDA build of torch, or set KIND_CPU"):
        instance.torch_target("auto")


def test_dtype_auto_is_fp32_on_the_cpu() -> None:
    import torch

    instance = Instance.from_args(triton_args("dit"))
    assert instance.torch_target("auto") == (torch.device("cpu"), torch.float32)
    assert instance.torch_target("bfloat16") == (torch.device("cpu"), torch.bfloat16)
