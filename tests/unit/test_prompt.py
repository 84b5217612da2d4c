"""Token ids equal diffusers' for odd prompts, and what cannot be encoded is refused before it costs anything."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import Qwen2TokenizerFast

from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import CheckpointError, open_checkpoint
from ditpack.models.prompt import DROP, TEMPLATE, PromptTokenizer

ODD_PROMPTS = [
    "a red kite",
    " ",
    "",
    "\n",
    "\nleading newline",
    "\r\n  spaces  inside   and after \n\n",
    "   leading spaces",
    "🪁🦊 emoji 👩‍👩‍👧‍👦 and é, ǅ, 漢字, ᄒ" + "ᄒ" * 3,
    "e\u0301 decomposed, \u1112\u1161\u11ab jamo",
    "braces {} {0} {prompt} %s",
    "<b>angle</b> < | im_end | > <|im_end",
    "it's 12345 o'clock; don't!",
    "two green trees on a purple background " * 25,
    "\0\x01\u200b\ufeff",
]


@pytest.fixture(params=["tiny", "embedded"])
def checkpoint_path(request: pytest.FixtureRequest, tiny_checkpoint: Path, embedded_checkpoint: Path) -> Path:
    return tiny_checkpoint if request.param == "tiny" else embedded_checkpoint


def pipeline_ids(path: Path, prompt: str) -> list[int]:
    """As QwenImagePipeline._get_qwen_prompt_embeds calls the tokenizer, by the pipeline's own template."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        transformer=None,
        tokenizer=Qwen2TokenizerFast.from_pretrained(path / "tokenizer"),
    )
    assert pipeline.prompt_template_encode == TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == DROP
    text = [pipeline.prompt_template_encode.format(prompt)]
    longest = pipeline.tokenizer_max_length + DROP
    ids = pipeline.tokenizer(text, max_length=longest, padding=True, truncation=True).input_ids[0]
    return list(ids)


@pytest.mark.parametrize("prompt", ODD_PROMPTS)
def test_ids_equal_diffusers(checkpoint_path: Path, prompt: str) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(checkpoint_path))
    ids = tokenizer.encode(prompt)
    assert ids == pipeline_ids(checkpoint_path, prompt)
    assert len(ids) > DROP


def test_a_prompt_of_200_tokens(checkpoint_path: Path) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(checkpoint_path))
    prompt = "1" * 200  # digits stand alone
    ids = tokenizer.encode(prompt)
    assert len(ids) == len(tokenizer.encode("")) + 200
    assert ids == pipeline_ids(checkpoint_path, prompt)


def test_the_limit_counts_the_prompt_alone(tiny_checkpoint: Path) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(tiny_checkpoint), max_tokens=50)
    assert tokenizer.max_tokens == 50
    tokenizer.encode("1" * 50)
    with pytest.raises(InvalidRequest, match=r"NEGATIVE_PROMPT = '1+': must not exceed 50 tokens, has 51") as caught:
        tokenizer.encode("1" * 51, field="NEGATIVE_PROMPT")
    assert caught.value.field == "NEGATIVE_PROMPT"


def test_the_default_limit_and_the_encoders_positions(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert PromptTokenizer(open_checkpoint(tiny_checkpoint)).max_tokens == 1024
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    config = json.loads((copy / "text_encoder/config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 100
    (copy / "text_encoder/config.json").write_text(json.dumps(config))
    tokenizer = PromptTokenizer(open_checkpoint(copy))
    longest = tokenizer.encode("1" * tokenizer.max_tokens)
    assert len(longest) == 100


def test_a_huge_prompt_is_refused_at_once(tiny_checkpoint: Path) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(tiny_checkpoint))
    start = time.monotonic()
    for text in ("a" * 10_000_000, "é" * 5_000_000, " " * 10_000_000, "\u0301" * 5_000_000):
        with pytest.raises(InvalidRequest, match="must not exceed 1024 tokens") as caught:
            tokenizer.encode(text)
        assert len(str(caught.value)) < 300
    assert time.monotonic() - start < 5


def test_the_byte_bound_refuses_nothing_that_fits(tiny_checkpoint: Path) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(tiny_checkpoint), max_tokens=4)
    for text in (
        " relationships" * 4,
        "\u1112\u1161\u11ab",
        "α\u0313\u0300\u0345",
    ):  # longest tokens; texts NFC shortens
        assert len(tokenizer.encode(text)) <= len(tokenizer.encode("")) + 4


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|image_pad|>"])
def test_special_tokens_are_refused(checkpoint_path: Path, token: str) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(checkpoint_path))
    with pytest.raises(InvalidRequest, match="special token") as caught:
        tokenizer.encode(f"a cat{token}\n<b>system", field="PROMPT")
    assert token in str(caught.value)


def test_lone_surrogates_are_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        PromptTokenizer(open_checkpoint(tiny_checkpoint)).encode("a \ud800 cat")


def test_vocab_and_merges_make_the_same_ids(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (copy / "tokenizer/tokenizer.json").unlink()
    first, second = (PromptTokenizer(open_checkpoint(path)) for path in (tiny_checkpoint, copy))
    for prompt in ODD_PROMPTS:
        assert first.encode(prompt) == second.encode(prompt)


def test_a_tokenizer_that_splits_the_template_otherwise_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = copy / "tokenizer/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="must make 34"):
        PromptTokenizer(open_checkpoint(copy))
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable Qwen2 tokenizer"):
        PromptTokenizer(open_checkpoint(copy))


def test_threads_share_one_tokenizer(tiny_checkpoint: Path) -> None:
    tokenizer = PromptTokenizer(open_checkpoint(tiny_checkpoint))
    expected = [tokenizer.encode(prompt) for prompt in ODD_PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(tokenizer.encode, ODD_PROMPTS, timeout=60)) == expected
