"""Denoising MammothModa2 requests in packs: what the engine needs to know of the family.

A request has an unconditional row only in the steps where its guidance is active, so a pack ends where that changes for
any of its members, which host numbers alone tell. Rows are [every member's conditional row, then the unconditional rows
of those guided now], the latter with no context at all; guided members come first and share the prefix of the latents.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ditpack.attention import select_attention
from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.config_rules import Config
from ditpack.models.families import UnusableError
from ditpack.models.mammoth_conditions import split_conditions
from ditpack.models.mammoth_config import MammothModa2Config
from ditpack.models.mammoth_moda2 import MammothModa2Transformer, Plan, stored_name
from ditpack.models.mammoth_request import MammothRequest, resolve
from ditpack.models.weights import load_component
from ditpack.packing.layout import Row
from ditpack.request import Limits
from ditpack.sampling.latents import seeded_noise, unpack_latents
from ditpack.sampling.on_device import OnDevice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """States of the autoregressive stage, fp32 [text + visual, llm_hidden_size]: ``text_tokens`` of text come first."""

    states: Tensor
    text_tokens: int


@dataclass(slots=True)
class Denoising:
    """One request on its way from noise to latents. ``times`` has one entry more than there are steps."""

    request: MammothRequest
    context: Tensor  # [c, D]: the refined conditioning, on the device, in the model's dtype
    grid: tuple[int, int]
    times: list[float]
    latents: Tensor  # fp32 [h·w, 4·channels] on the device
    step: int = 0
    before: Tensor | None = None  # the latents one step ago, for previews

    @property
    def guided(self) -> bool:
        """Whether guidance is active in the next step."""
        return self.request.guided_at(self.step)

    @property
    def rows(self) -> tuple[Row, ...]:
        return _rows(len(self.context), self.grid, self.guided)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def steps_left(self) -> int:
        return len(self.times) - 1 - self.step

    @property
    def steps_alike(self) -> int:
        """How many of the next steps have the same rows."""
        return next(
            (ahead for ahead in range(1, self.steps_left) if self.request.guided_at(self.step + ahead) != self.guided),
            self.steps_left,
        )


@dataclass(slots=True)
class Pack:
    """The requests of one forward and all that stays the same while their rows do. K steps fit in its tables."""

    members: list[Denoising]  # guided ones first
    plan: Plan
    context: Tensor  # [L, D]: of the conditional rows; the unconditional ones have none
    latents: Tensor  # fp32 [ΣS, 4·channels], each member once
    guided_tokens: int  # how many of those tokens, from the front, have an unconditional row too
    scales: Tensor  # fp32 [guided_tokens, 1]
    timesteps: Tensor  # [K, rows] in the model's dtype
    time_steps: Tensor  # fp32 [K, members]: t(next) - t
    token_members: Tensor  # int64 [ΣS]: the member of every latent token
    next: int = 0  # the table row that the next step reads

    @property
    def steps_left(self) -> int:
        """How many steps this pack can take before it has to be built anew."""
        return len(self.timesteps) - self.next

    @property
    def pad_tokens(self) -> int:
        """Always 0."""
        return 0


class MammothModa2Sampler(OnDevice):
    """Begins, packs, steps and finishes requests on one device."""

    def __init__(self, transformer: MammothModa2Transformer, pixels_per_patch: int) -> None:
        self.transformer = transformer
        self.config = transformer.config
        self.pixels_per_patch = pixels_per_patch
        parameter = next(transformer.parameters())
        super().__init__(parameter.device)
        self.dtype = parameter.dtype

    @staticmethod
    def conditioning(request: MammothRequest, read: Callable[[str], Tensor]) -> Conditioning:
        """The states that ``read`` returns for CONDITIONS, and how many of them are text, as TEXT_TOKENS says."""
        return Conditioning(read("CONDITIONS"), int(read("TEXT_TOKENS")))

    def example(self, image_tokens: int) -> tuple[MammothRequest, Conditioning]:
        """A square request of about that many image tokens with one text and one visual token, and no guidance."""
        side = math.isqrt(image_tokens) * self.pixels_per_patch
        values = {"WIDTH": side, "HEIGHT": side, "NUM_INFERENCE_STEPS": 8, "GUIDANCE_SCALE": 1.0}
        limits = Limits(side, side, size_multiple=self.pixels_per_patch, min_size=self.pixels_per_patch)
        states = np.zeros((2, self.config.llm_hidden_size), np.float32)
        conditions, text_tokens = split_conditions(states, np.array([0, self.config.visual_start]), 1, self.config)
        return resolve(values, limits), Conditioning(torch.from_numpy(conditions), text_tokens)

    def rows(self, request: MammothRequest, conditioning: Conditioning) -> tuple[Row, ...]:
        """The rows that ``request`` begins with.

        Raises:
            InvalidRequest: the states do not fit the checkpoint, or positions end before the text or the image does.
        """
        states, text_tokens = conditioning.states, conditioning.text_tokens
        width = self.config.llm_hidden_size
        if states.ndim != 2 or states.shape[1] != width:
            raise InvalidRequest("CONDITIONS", list(states.shape), f"must have shape [tokens, {width}]")
        if not 0 <= text_tokens < len(states):
            raise InvalidRequest("TEXT_TOKENS", text_tokens, f"must be between 0 and {len(states) - 1}")
        context = self.config.context_tokens(text_tokens, len(states) - text_tokens)
        grid = (request.height // self.pixels_per_patch, request.width // self.pixels_per_patch)
        for field, side, longest in zip(("HEIGHT", "WIDTH"), grid, self.config.axes_lens[1:], strict=True):
            if side > longest:
                pixels = side * self.pixels_per_patch
                raise InvalidRequest(field, pixels, f"must not exceed {longest * self.pixels_per_patch}")
        return _rows(context, grid, request.guided_at(0))

    @torch.inference_mode()
    def begin(self, request: MammothRequest, conditioning: Conditioning) -> Denoising:
        """Draw the noise of ``request`` and refine its conditioning. Raises as ``rows``."""
        (grid,) = self.rows(request, conditioning)[0].grids
        states = conditioning.states.to(self.device, self.dtype)
        (context,) = self.transformer.context(
            [(states[: conditioning.text_tokens], states[conditioning.text_tokens :])]
        )
        noise = seeded_noise(request.seed, self.config.in_channels, grid, self.dtype, channel_last=True)
        return Denoising(
            request=request,
            context=context,
            grid=grid,
            times=schedule(request.num_inference_steps, 4 * grid[0] * grid[1]),
            latents=noise.to(self.device).float(),
        )

    @torch.inference_mode()
    def pack(self, members: Sequence[Denoising]) -> Pack:
        """Lay ``members`` (at least one, none of them done) out for the steps until one of them changes its rows."""
        guided = [member for member in members if member.guided]
        ordered = guided + [member for member in members if not member.guided]
        rows = [member.rows[0] for member in ordered] + [member.rows[1] for member in guided]
        steps = min(member.steps_alike for member in ordered)
        ahead = [member.times[member.step : member.step + steps + 1] for member in ordered]
        times = torch.tensor(ahead, dtype=torch.float32).T  # [K + 1, members]
        lengths = torch.tensor([len(member.latents) for member in ordered])
        scales = torch.tensor([member.request.guidance_scale for member in guided], dtype=torch.float32)
        return Pack(
            members=ordered,
            plan=self.transformer.plan(rows, self.device),
            context=torch.cat([member.context for member in ordered]),
            latents=torch.cat([member.latents for member in ordered]),
            guided_tokens=int(lengths[: len(guided)].sum()),
            scales=scales.repeat_interleave(lengths[: len(guided)]).unsqueeze(1).to(self.device),
            timesteps=torch.cat((times[:-1], times[:-1, : len(guided)]), dim=1).to(self.device, self.dtype),
            time_steps=times.diff(dim=0).to(self.device),
            token_members=torch.arange(len(ordered)).repeat_interleave(lengths).to(self.device),
        )

    @torch.inference_mode()
    def step(self, pack: Pack) -> None:
        """Advance every member by one step, all or none: if this raises, nobody has moved."""
        total, guided = len(pack.latents), pack.guided_tokens
        image = pack.latents.to(self.dtype)
        inputs = torch.cat((image, image[:guided]))
        self.eager_forwards += 1
        predicted = self.transformer(inputs, pack.context, pack.timesteps[pack.next], pack.plan).float()
        velocity, unconditional = predicted[:total], predicted[total:]
        if guided:
            combined = unconditional + pack.scales * (velocity[:guided] - unconditional)
            velocity = torch.cat((combined, velocity[guided:]))
        pack.latents = pack.latents + pack.time_steps[pack.next][pack.token_members].unsqueeze(1) * velocity
        pack.next += 1
        lengths = [len(member.latents) for member in pack.members]
        for member, latents in zip(pack.members, pack.latents.split(lengths), strict=True):
            member.before, member.latents = member.latents, latents
            member.step += 1

    @torch.inference_mode()
    def preview(self, member: Denoising) -> Callable[[], Tensor]:
        """As ``finish``, for the clean latents x + (1 - t) · v that the last step predicts."""
        if member.before is None:
            raise ValueError("no step has been taken yet")
        last, time = member.times[member.step - 1], member.times[member.step]
        velocity = (member.latents - member.before) / (time - last)
        clean = member.latents + (1 - time) * velocity
        return self.to_host(unpack_latents(clean, member.grid, channel_last=True))

    @torch.inference_mode()
    def finish(self, member: Denoising) -> Callable[[], Tensor]:
        """Start bringing the finished latents to the host; the returned function waits for them, on any thread.

        It returns fp32 [channels, 2h, 2w] in the VAE's scaled latent space.
        """
        return self.to_host(unpack_latents(member.latents, member.grid, channel_last=True))


def schedule(steps: int, latent_pixels: int) -> list[float]:
    """The times of ``steps`` steps: ``steps`` + 1 float32 values from 0 (noise) up to 1 (data).

    Source: the reference's ``FlowMatchEulerDiscreteScheduler.set_timesteps``; larger images stay longer near the noise.
    """
    times = np.linspace(0, 1, steps + 1, dtype=np.float32)[:-1]
    shift = np.float32(math.sqrt(latent_pixels) / 40)
    shifted = times / (shift - shift * times + times)
    return [*(float(time) for time in shifted), 1.0]


def _rows(context: int, grid: tuple[int, int], guided: bool) -> tuple[Row, ...]:
    return (Row(context, (grid,)), Row(0, (grid,))) if guided else (Row(context, (grid,)),)


def load_sampler(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, attention: str, quantization: str
) -> MammothModa2Sampler:
    """As ``models.families.load_sampler``. Not quantised: fp8 is refused."""
    if quantization != "none":
        raise UnusableError("quantization", "must be none for MammothModa2")
    config = MammothModa2Config.read(Config(checkpoint.path / "config.json", checkpoint.transformer_config))
    heads = (config.num_attention_heads, config.head_dim, config.num_kv_heads)
    try:
        varlen = select_attention(attention, device, dtype, *heads)
    except ValueError as error:
        raise UnusableError("attention", str(error)) from error
    with torch.device("meta"):
        transformer = MammothModa2Transformer(config, varlen)
    report = load_component(checkpoint, "", transformer, device, dtype, rename=stored_name)
    logger.info("transformer: %s", report)
    pixels_per_patch = checkpoint.vae_scale_factor * config.patch_size
    return MammothModa2Sampler(transformer.eval().requires_grad_(False), pixels_per_patch)
