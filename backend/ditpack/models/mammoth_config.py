"""The numbers of a MammothModa2 checkpoint's config.json, checked. No torch: ``mammoth_prepare`` reads them too.

Source: bytedance/mammothmoda ``Mammothmoda2Config`` and its ``Transformer2DModel`` and ``SimpleQFormerImageRefiner``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ditpack.errors import InvalidRequest
from ditpack.models.config_rules import CheckpointError, Config

MODEL_TYPE = "mammothmoda2"
_NESTED_REFINER = "mammothmoda2_qwen3_vl"  # the language model of the checkpoints whose refiner is part of the DiT
_VISUAL_START = 152064  # the first id of the visual vocabulary where no config says it

# What gen_* keys may stand at the top level. The last two belong to training and to the autoregressive stage.
_GEN_KEYS = {
    *("gen_dit_config", "gen_vae_config", "gen_image_condition_refiner_config", "gen_condition_mode"),
    *("gen_axes_dim_rope", "gen_axes_lens", "gen_transport_config", "gen_token_config"),
}
_DIT_COUNTS = (
    *("in_channels", "hidden_size", "num_layers", "num_refiner_layers"),
    *("num_attention_heads", "num_kv_heads", "multiple_of"),
)
_DIT_KEYS = {"patch_size", "out_channels", "norm_eps", "timestep_scale", "ffn_dim_multiplier", *_DIT_COUNTS}
_UNUSED_DIT_KEYS = {"axes_dim_rope", "axes_lens", "text_feat_dim"}  # replaced by gen_axes_* and the real text width


@dataclass(frozen=True, slots=True)
class RefinerConfig:
    """The Q-Former that turns any number of visual tokens into ``num_queries``."""

    num_queries: int = 128
    num_layers: int = 2
    num_heads: int | None = None
    dropout: float = 0.0  # training's
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class MammothModa2Config:
    """The diffusion transformer's numbers, those of its refiner, and what tells the tokens of an answer apart."""

    # gen_dit_config, under the same names.
    patch_size: int = 2
    in_channels: int = 16
    out_channels: int | None = None
    hidden_size: int = 2304
    num_layers: int = 26
    num_refiner_layers: int = 2
    num_attention_heads: int = 24
    num_kv_heads: int = 8
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    timestep_scale: float = 1.0
    # The top level's.
    axes_dim: tuple[int, ...] = (32, 32, 32)
    axes_lens: tuple[int, ...] = (10000, 10000, 10000)
    # llm_config's.
    llm_hidden_size: int = 3584
    visual_start: int = _VISUAL_START
    placeholder_ids: tuple[int, ...] = (151655, 151656, 151652, 151653)  # image, video, vision start, vision end
    # None: the visual tokens' states are used as they are. Nested: the refiner's output has the DiT's width.
    refiner: RefinerConfig | None = None
    nested_refiner: bool = False

    @classmethod
    def read(cls, root: Config) -> MammothModa2Config:
        """Read and check a root config.

        Raises:
            CheckpointError: naming the file, the key, its value and what is allowed.
        """
        root.one_of("model_type", (MODEL_TYPE,))
        root.one_of("gen_condition_mode", ("image", "text_image"), default="image")
        for key in root.values:
            if key.startswith("gen_") and key not in _GEN_KEYS and root[key] is not None:
                raise root.error(key, f"unknown key; known are {', '.join(sorted(_GEN_KEYS))}")
        dit, llm = _part(root, "gen_dit_config"), _part(root, "llm_config")
        _check_known(dit, _DIT_KEYS | _UNUSED_DIT_KEYS)
        nested = llm.get("model_type") == _NESTED_REFINER
        config = cls(
            **{key: dit[key] for key in _DIT_KEYS if dit.get(key) is not None},
            axes_dim=tuple(_three(root, "gen_axes_dim_rope", 40)),
            axes_lens=tuple(_three(root, "gen_axes_lens", 10000)),
            llm_hidden_size=_level(llm, "hidden_size", None),
            visual_start=_level(llm, "gen_vocab_start_index", _VISUAL_START),
            placeholder_ids=(
                _level(llm, "image_token_id", 151655),
                _level(llm, "video_token_id", 151656),
                _level(llm, "vision_start_token_id", 151652),
                _level(llm, "vision_end_token_id", 151653),
            ),
            refiner=_refiner(root),
            nested_refiner=nested,
        )
        config._check(root, dit)
        return config

    def _check(self, root: Config, dit: Config) -> None:
        _check_numbers(dit, _DIT_COUNTS, ("norm_eps", "timestep_scale", "ffn_dim_multiplier"))
        if self.patch_size != 2:
            raise dit.error("patch_size", "must be 2")
        if self.out_channels not in (None, self.in_channels):
            raise dit.error("out_channels", f"must be null or in_channels = {self.in_channels}")
        if self.hidden_size % self.num_attention_heads:
            raise dit.error("hidden_size", f"must be a multiple of num_attention_heads = {self.num_attention_heads}")
        if self.num_attention_heads % self.num_kv_heads:
            raise dit.error("num_kv_heads", f"must divide num_attention_heads = {self.num_attention_heads}")
        if sum(self.axes_dim) != self.head_dim or any(axis % 2 for axis in self.axes_dim):
            raise root.error("gen_axes_dim_rope", f"must be three even numbers that add up to {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def time_dim(self) -> int:
        """Width of the timestep embedding."""
        return min(self.hidden_size, 1024)

    def ffn_dim(self, dim: int) -> int:
        """Width inside the gated feed-forward of the DiT's layers."""
        return round_up(int((self.ffn_dim_multiplier or 1) * 4 * dim), self.multiple_of)

    def context_tokens(self, text_tokens: int, image_tokens: int) -> int:
        """Length of the conditioning that text and visual tokens become.

        Raises:
            InvalidRequest: without visual tokens, or when it is too long for the rotary tables.
        """
        if image_tokens < 1:
            raise InvalidRequest("TOKEN_IDS", "the answer", "must have at least one visual token")
        tokens = text_tokens + (self.refiner.num_queries if self.refiner else image_tokens)
        longest = min(self.axes_lens[0] - 1, *self.axes_lens[1:])
        if tokens > longest:
            raise InvalidRequest("TOKEN_IDS", f"{tokens} tokens of conditioning", f"must not exceed {longest}")
        return tokens


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _part(root: Config, key: str) -> Config:
    if not isinstance(root[key], dict):
        raise root.error(key, "must be an object")
    return Config(root.file.with_name(f"{root.file.name}: {key}"), root[key])


def _check_known(config: Config, known: set[str]) -> None:
    for key in config.values:
        if key not in known and not key.startswith("_"):  # _class_name and the like
            raise config.error(key, f"unknown key; known are {', '.join(sorted(known))}")


def _check_numbers(config: Config, counts: tuple[str, ...], positive: tuple[str, ...]) -> None:
    """Those of the keys that are there must be positive integers, or positive numbers (or null)."""
    for key in counts:
        if key in config.values:
            config.count(key)
    for key in positive:
        value = config.get(key)
        if value is not None and not (type(value) in (int, float) and value > 0):
            raise config.error(key, "must be a positive number")


def _refiner(root: Config) -> RefinerConfig | None:
    if root.get("gen_image_condition_refiner_config") is None:
        return None
    config = _part(root, "gen_image_condition_refiner_config")
    known = set(RefinerConfig.__dataclass_fields__)
    _check_known(config, known)
    values = {key: value for key, value in config.values.items() if key in known and value is not None}
    _check_numbers(Config(config.file, values), ("num_queries", "num_layers", "num_heads"), ("norm_eps",))
    return RefinerConfig(**values)


def _three(root: Config, key: str, default: int) -> list[int]:
    return root.numbers(key, 3, integers=True) if root.get(key) is not None else [default] * 3


def _level(llm: Config, key: str, default: int | None) -> int:
    """A number of the language model: of llm_config itself, else of its text_config, else ``default``."""
    text = llm.get("text_config")
    if not isinstance(text, dict | None):
        raise llm.error("text_config", "must be an object")
    levels = (llm.get(key), (text or {}).get(key), default)
    value = next((value for value in levels if value is not None), None)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{llm.file}: {key} = {value!r}, also in text_config: must be a positive integer")
    return value
