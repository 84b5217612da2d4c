"""Pictures of the embedded model as people see them: what packing, several processes and previews do to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import sp_quality

from ditpack.demo_model.painter import Job, Painter
from ditpack.models.preview import fit, project

CPU = torch.device("cpu")
PROMPT = "a red apple on a blue background"
JOBS = [
    Job(PROMPT, (128, 96), 1),
    Job("two pink hearts, glossy style", (160, 96), 2),
    Job("a cactus on a yellow background, flat style", (64, 96), 3),
]


@pytest.fixture(scope="module")
def painter(embedded_checkpoint: Path) -> Painter:
    return Painter(embedded_checkpoint, CPU)


def compare(ours: Any, theirs: Any) -> dict[str, Any]:
    """SSIM and PSNR of two uint8 pictures [H, W, 3]."""
    return sp_quality.compare(*(torch.from_numpy(np.array(x)).permute(2, 0, 1) for x in (ours, theirs)))


def test_pictures_of_a_pack_are_the_pictures_alone(painter: Painter) -> None:
    together = next(painter.paint(JOBS, steps=6))
    for job, packed in zip(JOBS, together, strict=True):
        assert packed.shape == (job.size[1], job.size[0], 3)
        alone = next(painter.paint([job], steps=6))[0]
        found = compare(packed, alone)
        assert found["ssim"] > 0.9999
        assert found["psnr_db"] is None or found["psnr_db"] > 60
    other = next(painter.paint([Job(PROMPT, (128, 96), 5)], steps=6))[0]
    assert compare(together[0], other)["ssim"] < 0.9, "another seed is another picture, or this says nothing"


def test_previews_come_to_look_like_the_picture(painter: Painter) -> None:
    steps, colours = 6, fit(painter.decoder)
    member = painter.sampler.begin(*painter.prepare([JOBS[0]], steps, 3.0)[0])
    pack, previews = painter.sampler.pack([member]), []
    while pack.steps_left:
        painter.sampler.step(pack)
        previews.append(project(painter.sampler.preview(member)(), colours).numpy())
    final = painter.decoder.decode([painter.sampler.finish(member)()])[0]
    found = [compare(preview, small(final)) for preview in previews]
    assert found[-1]["ssim"] > found[0]["ssim"] + 0.1
    assert found[steps // 2]["ssim"] > 0.95 * found[-1]["ssim"], "half way it shows what it is going to be"
    assert found[-1]["psnr_db"] > 17, "a linear map of the latents: colours and places, no detail"
    other = next(painter.paint([Job(JOBS[2].prompt, JOBS[0].size, 3)], steps))[0]
    mistaken = compare(previews[-1], small(other))
    assert found[-1]["psnr_db"] > mistaken["psnr_db"] + 5, "a linear map of the latents tells colours and places"


def small(picture: Any) -> Any:
    """A pixel for each of its latent pixels."""
    height, width = picture.shape[:2]
    return np.asarray(Image.fromarray(picture).resize((width // 8, height // 8), Image.Resampling.BOX))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


def _embedded(_degree: int) -> list[dict[str, Any]]:
    return list(sp_quality.embedded(CPU, torch.float32, "sdpa", prompts=[PROMPT], steps=8))


def test_two_processes_paint_what_one_paints(ranks: Ranks) -> None:
    """Padding that is a segment of its own changes nothing; padding that is attended to, as elsewhere, does."""
    found = {record["impl"]: record for record in ranks.call(2, _embedded)[0]}
    assert found["segment"]["padding"] == 1
    for way in ("segment", "rows"):
        assert found[way]["ssim"] > 0.9999
        assert found[way]["psnr_db"] is None or found[way]["psnr_db"] > 60
    assert found["unmasked"]["psnr_db"] < 60
    assert found["unmasked"]["rel_err"] > 10 * found["segment"]["rel_err"]
    assert found["unmasked"]["ssim"] < found["segment"]["ssim"]
