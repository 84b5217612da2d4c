"""Prompts to token ids, exactly as diffusers' QwenImagePipeline and its edit pipelines make them. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Qwen2TokenizerFast

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint, CheckpointError

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
DROP = 34  # tokens of the template before the prompt; their hidden states are left out
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
EDIT_DROP = 64
IMAGE_TOKEN = "<|image_pad|>"
DEFAULT_MAX_TOKENS = 1024

# NFC, the tokenizer's first step, can make a text shorter: at most threefold, three Hangul jamo to one syllable.
_NFC_SHRINKS = 3


class PromptTokenizer:
    """Tokenises prompts within the template; safe to call from several threads.

    ``max_tokens`` is the most tokens a prompt may have, the template not counted; the text encoder's positions cap it.
    """

    def __init__(self, checkpoint: Checkpoint, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        """Raises CheckpointError when the folder's tokenizer cannot be read or does not fit the template."""
        directory = checkpoint.path / "tokenizer"
        try:
            loaded = Qwen2TokenizerFast.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{directory}: not a readable Qwen2 tokenizer: {error}") from error
        # Not transformers' wrapper, which changes the tokenizer's truncation at every call: threads share it.
        self._tokenizer = loaded.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = sorted(token.content for token in added if token.special)
        self._editing = checkpoint.editing
        for template, drop in [(TEMPLATE, DROP), (EDIT_TEMPLATE, EDIT_DROP)][: 2 if self._editing else 1]:
            if (prefix := len(self._ids(template.partition("{}")[0]))) != drop:
                raise CheckpointError(
                    f"{directory}: makes {prefix} tokens of the template before the prompt; must make {drop}"
                )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        size = checkpoint.text_config["vocab_size"]
        if (last := max(vocabulary.values())) >= size:
            raise CheckpointError(
                f"{directory}: has the token id {last}; must stay below vocab_size = {size} of the text encoder"
            )
        if self._editing and vocabulary.get(IMAGE_TOKEN) != (known := checkpoint.text_encoder_config["image_token_id"]):
            raise CheckpointError(
                f"{directory}: {IMAGE_TOKEN} is {vocabulary.get(IMAGE_TOKEN)}; must be image_token_id = {known} of the "
                "text encoder"
            )
        self._positions: int = checkpoint.text_config["max_position_embeddings"]
        self.max_tokens = min(max_tokens, self._positions - len(self._ids(TEMPLATE.format(""))))
        if self.max_tokens < 1:
            raise CheckpointError(
                f"{directory}: leaves no room for a prompt: max_tokens = {max_tokens}, the text encoder has "
                f"{self._positions}"
            )
        # A byte-level token stands for one byte a character, so no text that fits is longer than this.
        self._max_bytes = _NFC_SHRINKS * self.max_tokens * max(len(token) for token in vocabulary)

    def encode(self, text: str, field: str = "PROMPT", image_tokens: Sequence[int] = ()) -> list[int]:
        """The token ids of the whole template with ``text`` in it. ``field`` is the name that errors use.

        ``image_tokens``: how many tokens each reference image takes; with any, the template is that of edits. They and
        the template do not count against ``max_tokens``.

        Raises:
            InvalidRequest: more than ``max_tokens`` tokens, or one of the tokenizer's special tokens in the text.
        """
        if len(text.encode("utf-8", "surrogatepass")) > self._max_bytes:  # before any work that grows with the text
            raise InvalidRequest(field, text, f"must not exceed {self.max_tokens} tokens")
        for token in self._special:
            if token in text:
                raise InvalidRequest(field, text, f"must not contain the special token {token}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequest(field, text, "must not contain lone surrogates")
        template = EDIT_TEMPLATE.replace("{}", self._pictures(image_tokens) + "{}") if image_tokens else TEMPLATE
        ids = self._ids(template.replace("{}", text))
        overhead = len(self._ids(template.replace("{}", "")))
        used, allowed = len(ids) - overhead, min(self.max_tokens, self._positions - overhead)
        if used > allowed:
            raise InvalidRequest(field, text, f"must not exceed {allowed} tokens, has {used}")
        return ids

    def _pictures(self, image_tokens: Sequence[int]) -> str:
        """What stands before the prompt of an edit: each image's place, and its number where the family has one."""
        if self._editing is None:
            raise ValueError("this checkpoint's prompts have no images")
        pictures = [f"<|vision_start|>{IMAGE_TOKEN * count}<|vision_end|>" for count in image_tokens]
        if self._editing.numbered:
            pictures = [f"Picture {number}: {picture}" for number, picture in enumerate(pictures, start=1)]
        return "".join(pictures)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)
