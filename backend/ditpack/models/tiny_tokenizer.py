"""A small byte-level BPE of a checkpoint's own, in the files that Qwen2Tokenizer reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ditpack.models.prompt import DROP, EDIT_DROP, EDIT_TEMPLATE, TEMPLATE

_VOCABULARY = 512
_EDIT_VOCABULARY = 896  # the words of two templates
# Qwen2.5's special tokens in its order.
_SPECIAL = [
    f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start")
]
_SPECIAL += [
    f"<|{name}|>" for name in ("box_end", "quad_start", "quad_end", "vision_start", "vision_end", "vision_pad")
]
_SPECIAL += ["<|image_pad|>", "<|video_pad|>"]
# Qwen2's split into words: contractions, letters, single digits, punctuation, line ends, spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = "a red kite on a blue sky, two green trees and a black cat next to a white house in the snow"


def write_tiny_tokenizer(directory: Path, edit: bool = False) -> None:
    """The tiny checkpoint's, of an editing one if ``edit``."""
    templates = {TEMPLATE: DROP, EDIT_TEMPLATE: EDIT_DROP} if edit else {TEMPLATE: DROP}
    write_tokenizer(directory, [_TEXT], _EDIT_VOCABULARY if edit else _VOCABULARY, templates)


def write_tokenizer(directory: Path, texts: Sequence[str], vocabulary: int, templates: Mapping[str, int]) -> None:
    """Write tokenizer.json, vocab.json, merges.txt and tokenizer_config.json into the existing folder ``directory``.

    ``vocabulary`` is the most tokens it may have, trained on ``texts``. A pipeline drops exactly as many tokens of a
    template as ``templates`` says, so training sees each often enough to make each of its words one token.

    Raises:
        RuntimeError: the vocabulary is too small for that.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = "\0".join(templates)
    for token in _SPECIAL:
        template = template.replace(token, "\0")
    parts = [part for part in template.replace("{}", "").split("\0") if part]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*parts * max(100, len(texts) // 30), *texts], trainer)
    tokenizer.model.save(str(directory))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "additional_special_tokens": _SPECIAL[1:],
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "bos_token": None,
        "padding_side": "right",
        "model_max_length": 2048,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    for template, drop in templates.items():
        prefix = tokenizer.encode(template.partition("{}")[0]).ids
        if len(prefix) != drop:
            raise RuntimeError(f"the template's prefix is {len(prefix)} tokens, must be {drop}")
