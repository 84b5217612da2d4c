"""``config.pbtxt`` parameters as typed settings, and the device that Triton gave this instance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ditpack.errors import DitpackError
from ditpack.models.checkpoint import WEIGHTS

if TYPE_CHECKING:
    import torch

S = TypeVar("S")

_MOST_PIXELS = 2**26  # 8192 x 8192


class ParameterError(DitpackError):
    """A model cannot load as it is configured."""

    def __init__(self, model: str, parameter: str, value: str, allowed: str) -> None:
        super().__init__(f"model '{model}': parameter {parameter} = {value!r}: {allowed}")


def _setting(default: Any, parse: Callable[[str], Any], allowed: str) -> Any:
    """One parameter: ``parse`` turns its string into a value or raises ValueError; ``allowed`` says what it takes."""
    return dataclasses.field(default=default, metadata={"parse": parse, "allowed": allowed})


def _number(kind: type[int] | type[float], default: float | None, low: float, high: float, auto: bool = False) -> Any:
    def parse(text: str) -> float | None:
        if auto and text == "auto":
            return default
        value = kind(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    what = "an integer" if kind is int else "a number"
    return _setting(default, parse, f"must be {what} from {low} to {high}{', or auto' if auto else ''}")


def _choice(*names: str) -> Any:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return _setting(names[0], parse, f"must be one of {', '.join(names)}")


def _words(default: str) -> Any:
    def parse(text: str) -> str:
        if not text.strip():
            raise ValueError(text)
        return text.strip()

    return _setting(default, parse, "must not be blank")


def _devices() -> Any:
    def parse(text: str) -> tuple[str, ...]:
        if text == "none":
            return ()
        names = [name.strip() for name in text.split(",")]
        if len(names) < 2:
            raise ValueError(text)
        if set(names) == {"cpu"}:
            return tuple(names)
        if not all(name.isdecimal() for name in names) or len(set(map(int, names))) < len(names):
            raise ValueError(text)
        return tuple(f"cuda:{int(name)}" for name in names)

    allowed = "must be none, two or more different GPU ordinals such as 0,1, or cpu as often as there are to be ranks"
    return _setting((), parse, allowed)


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    checkpoint: str = _words("auto")
    max_pixels: int = _number(int, 2048 * 2048, 64 * 64, _MOST_PIXELS)
    max_prompt_tokens: int = _number(int, 1024, 1, 32768)


@dataclass(frozen=True, slots=True)
class PrepareEditSettings:
    checkpoint: str = _words("auto")
    max_pixels: int = _number(int, 2048 * 2048, 64 * 64, _MOST_PIXELS)
    max_prompt_tokens: int = _number(int, 1024, 1, 32768)
    max_image_bytes: int = _number(int, 20 * 2**20, 1024, 2**30)
    max_image_pixels: int = _number(int, 50_000_000, 64 * 64, 2**29)


@dataclass(frozen=True, slots=True)
class MammothPrepareSettings:
    checkpoint: str = _words("auto")
    max_pixels: int = _number(int, 2048 * 2048, 64 * 64, _MOST_PIXELS)


@dataclass(frozen=True, slots=True)
class TextEncoderSettings:
    checkpoint: str = _words("auto")
    weights: str = _choice("auto", *WEIGHTS)
    dtype: str = _choice("auto", "bfloat16", "float32")
    cache_mib: float = _number(float, 64.0, 0.0, 65536.0)


@dataclass(frozen=True, slots=True)
class VaeEncoderSettings:
    checkpoint: str = _words("auto")
    weights: str = _choice("auto", *WEIGHTS)
    dtype: str = _choice("auto", "bfloat16", "float32")
    cache_mib: float = _number(float, 64.0, 0.0, 65536.0)


@dataclass(frozen=True, slots=True)
class DitSettings:
    checkpoint: str = _words("auto")
    weights: str = _choice("auto", *WEIGHTS)
    dtype: str = _choice("auto", "bfloat16", "float32")
    attention: str = _words("auto")  # the attention package knows the names and refuses others
    quantization: str = _choice("none", "fp8")
    max_pixels: int = _number(int, 2048 * 2048, 64 * 64, _MOST_PIXELS)
    token_budget: int | None = _number(int, None, 64, 2**22, auto=True)  # None: measured
    max_queue_size: int = _number(int, 256, 0, 65536)  # requests
    queue_timeout_s: float = _number(float, 300.0, 0.1, 86400.0)
    devices: tuple[str, ...] = _devices()  # torch's names; empty: the instance's own
    parallel: str = _choice("tokens", "rows")
    sp_padding: str = _choice("segment", "masked", "unmasked")
    worker_timeout_s: float = _number(float, 60.0, 1.0, 3600.0)
    lost_workers: str = _choice("restart", "refuse")


@dataclass(frozen=True, slots=True)
class VaeDecoderSettings:
    checkpoint: str = _words("auto")
    weights: str = _choice("auto", *WEIGHTS)
    dtype: str = _choice("auto", "bfloat16", "float32")
    max_pixels: int = _number(int, 2048 * 2048, 64 * 64, _MOST_PIXELS)


def parse_parameter(kind: type[Any], name: str, text: str) -> Any:
    """The value of one parameter of ``kind``, a dataclass above. The linter and the models share this rule.

    Raises:
        ValueError: saying what is allowed.
    """
    known = {field.name: field.metadata for field in dataclasses.fields(kind)}
    if name not in known:
        raise ValueError(f"unknown parameter; known are {', '.join(sorted(known))}")
    try:
        return known[name]["parse"](text)
    except ValueError:
        raise ValueError(known[name]["allowed"]) from None


@dataclass(frozen=True, slots=True)
class StreamSettings:
    ensemble: str = _words("qwen_image")
    # Read before the model is loaded, to decide whether it is.
    family: str = _words("QwenImagePipeline QwenImageEditPipeline QwenImageEditPlusPipeline")


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """None."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One model instance, as Triton describes it to ``initialize``."""

    model: str
    name: str
    device: str | None  # "cpu" or "cuda:<ordinal>"; None for KIND_MODEL, which sees to its devices itself
    config: Mapping[str, Any]

    @classmethod
    def from_args(cls, args: Mapping[str, str], several_devices: bool = False) -> Instance:
        """Read ``initialize``'s arguments. ``several_devices``: the model can run on more than one.

        Raises:
            ParameterError: the instance kind is one this model cannot run on.
        """
        kind = args["model_instance_kind"]
        if kind not in (("CPU", "GPU", "MODEL") if several_devices else ("CPU", "GPU")):
            allowed = "must be KIND_AUTO, KIND_GPU or KIND_CPU"
            raise ParameterError(args["model_name"], "instance_group.kind", f"KIND_{kind}", allowed)
        gpu = f"cuda:{args['model_instance_device_id']}" if kind == "GPU" else None
        return cls(
            model=args["model_name"],
            name=args["model_instance_name"],
            device="cpu" if kind == "CPU" else gpu,
            config=json.loads(args["model_config"]),
        )

    def settings(self, kind: type[S]) -> S:
        """The model's parameters as ``kind``, one of the dataclasses above.

        Raises:
            ParameterError: naming the model, the parameter, its value and what is allowed.
        """
        values = {}
        for name, entry in self.config.get("parameters", {}).items():
            text = entry["string_value"]
            try:
                values[name] = parse_parameter(kind, name, text)
            except ValueError as error:
                raise ParameterError(self.model, name, text, str(error)) from None
        return kind(**values)

    def torch_target(self, dtype: str) -> tuple[torch.device, torch.dtype]:
        """The device and dtype to load on. Imports torch: the stub that only reads the config never gets here.

        Raises:
            ParameterError: Triton gave the instance a GPU that this PyTorch cannot use.
        """
        import torch

        assert self.device is not None
        device = torch.device(self.device)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                allowed = "this PyTorch cannot use the GPU; install a CUDA build of torch, or set KIND_CPU"
                raise ParameterError(self.model, "instance_group.kind", "KIND_GPU", allowed)
            torch.cuda.set_device(device)
        return device, torch_dtype(dtype, device.type)


def torch_dtype(dtype: str, device_type: str) -> torch.dtype:
    """The setting ``dtype`` on a device of that type. Imports torch."""
    import torch

    if dtype == "auto":
        dtype = "bfloat16" if device_type == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
