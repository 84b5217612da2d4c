"""Denoising Qwen-Image requests in packs: what the engine needs to know of the family.

One pack holds any mix of requests, edits too. Guided ones come first, so their unconditional rows reuse a prefix of the
same latents: rows are [every request's conditional row, then the guided requests' unconditional rows]. Only targets are
denoised: the tokens of reference images stay in the pack's image stream, and nobody reads what is predicted for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ditpack.attention import select_attention
from ditpack.attention.sdpa import SDPA
from ditpack.errors import InvalidRequest
from ditpack.models.checkpoint import Checkpoint
from ditpack.models.families import UnusableError
from ditpack.models.graphs import Bucket, GraphCache, bucket_for
from ditpack.models.modulation import ModulationTable
from ditpack.models.quantized import quantize_blocks
from ditpack.models.qwen_image import (
    MAX_POSITION,
    PackedRotary,
    QwenImageConfig,
    QwenImageTransformer,
    stored_name,
    text_start,
)
from ditpack.models.weights import load_component
from ditpack.packing.layout import Layout, Row, build_layout, target_places
from ditpack.request import ImageRequest, Limits, resolve
from ditpack.sampling.flow_match import FlowMatchSchedule
from ditpack.sampling.guidance import true_cfg
from ditpack.sampling.latents import seeded_noise, unpack_latents
from ditpack.sampling.on_device import OnDevice

logger = logging.getLogger(__name__)

# Timesteps whose modulation is kept: all that bfloat16 tells apart between 20 and 1000; 3.4 GB for the 20 B model.
_MODULATION_CAPACITY = 768
# Packs up to this many tokens run from captured graphs. A step's launches take the host about 40 ms for the 20 B model,
# up to 80 on a busy host; an H200 needs 65 ms for 2,560 tokens.
_GRAPH_TOKENS = 2560


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What a request is conditioned on.

    Text features are [L, joint_attention_dim], the negative ones None without guidance. ``reference_latents`` are the
    normalised latents of all reference images as tokens [n, in_channels], one image after the other; None without any.
    """

    prompt_embeds: Tensor
    negative_prompt_embeds: Tensor | None
    reference_latents: Tensor | None = None


@dataclass(slots=True)
class Denoising:
    """One request on its way from noise to latents. ``sigmas`` has one entry more than there are steps."""

    request: ImageRequest
    embeds: tuple[Tensor, ...]  # conditional, then unconditional when guided; on the device, in the model's dtype
    references: Tensor  # [n, in_channels], likewise; n is 0 without reference images
    rows: tuple[Row, ...]  # one for each of embeds
    grid: tuple[int, int]
    sigmas: list[float]
    latents: Tensor  # fp32 [h·w, in_channels] on the device
    step: int = 0
    before: Tensor | None = None  # the latents before the last step

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def steps_left(self) -> int:
        return len(self.sigmas) - 1 - self.step


@dataclass(slots=True)
class Pack:
    """The requests of one forward and all that stays the same while they stay together. K steps fit in its tables."""

    members: list[Denoising]  # guided ones first
    layout: Layout
    rotary: PackedRotary
    bucket: Bucket | None  # which captured graph can run it
    text: Tensor  # [L, joint_attention_dim], all rows
    image: Tensor  # [S, in_channels], all rows: reference images in place, zeros for the targets and in padding rows
    targets: Tensor  # int64: where in it the targets of the members' rows are
    latents: Tensor  # fp32 [ΣS, in_channels], each member's target once
    guided_tokens: int  # how many of those tokens, from the front, have an unconditional row too
    scales: Tensor  # fp32 [guided_tokens, 1]
    modulation_slots: (
        Tensor  # int64 [K, rows (+ 1)]: where the sampler's table holds each row's modulation (and t = 0's)
    )
    sigma_steps: Tensor  # fp32 [K, members]: sigma(next) - sigma
    token_members: Tensor  # int64 [ΣS]: the member of every latent token
    next: int = 0  # the table row that the next step reads

    @property
    def steps_left(self) -> int:
        """How many steps this pack can take before it has to be built anew."""
        return len(self.modulation_slots) - self.next

    @property
    def pad_tokens(self) -> int:
        """Tokens that fill the pack up to its bucket."""
        return self.bucket.tokens - sum(member.tokens for member in self.members) if self.bucket else 0


class QwenImageSampler(OnDevice):
    """Begins, packs, steps and finishes requests on one device.

    ``graphs``: small packs run from captured CUDA graphs; needs an attention that reads lengths from the device alone.
    """

    def __init__(
        self,
        transformer: QwenImageTransformer,
        schedule: FlowMatchSchedule,
        pixels_per_patch: int,
        graphs: bool = False,
    ) -> None:
        self.transformer = transformer
        self.schedule = schedule
        self.pixels_per_patch = pixels_per_patch
        parameter = next(transformer.parameters())
        super().__init__(parameter.device)
        self.dtype = parameter.dtype
        self._modulation = ModulationTable(transformer.modulation, self.device, self.dtype, _MODULATION_CAPACITY)
        self._graph_tokens = _GRAPH_TOKENS if graphs else 0
        self.graphs = GraphCache(self._forward)

    def run_eagerly(self) -> None:
        """Use no graphs from now on: one of several ranks cannot, for its share of a bucket has no fixed shape."""
        self._graph_tokens = 0

    @staticmethod
    def conditioning(request: ImageRequest, read: Callable[[str], Tensor]) -> Conditioning:
        """What ``read`` returns for EMBEDS, with guidance NEGATIVE_EMBEDS, and for edits REFERENCE_LATENTS."""
        return Conditioning(
            read("EMBEDS"),
            read("NEGATIVE_EMBEDS") if request.guided else None,
            read("REFERENCE_LATENTS") if request.references else None,
        )

    def example(self, image_tokens: int) -> tuple[ImageRequest, Conditioning]:
        """A square request of about that many image tokens with 16 tokens of text, and no guidance."""
        side = math.isqrt(image_tokens) * self.pixels_per_patch
        features = torch.zeros(16, self.transformer.config.joint_attention_dim)
        values = {"PROMPT": "example", "WIDTH": side, "HEIGHT": side, "NUM_INFERENCE_STEPS": 8, "TRUE_CFG_SCALE": 1.0}
        limits = Limits(side, side, size_multiple=self.pixels_per_patch, min_size=self.pixels_per_patch)
        return resolve(values, limits), Conditioning(features, None)

    def rows(self, request: ImageRequest, conditioning: Conditioning) -> tuple[Row, ...]:
        """The rows that ``request`` will have in a pack.

        Raises:
            InvalidRequest: if the text features have another width than the checkpoint's, or are too many to have
                rotary positions, or if the reference latents are not those of the request's reference images.
        """
        sizes = [(request.height, request.width), *((image.height, image.width) for image in request.references)]
        grids = tuple((height // self.pixels_per_patch, width // self.pixels_per_patch) for height, width in sizes)
        expected = (sum(height * width for height, width in grids[1:]), self.transformer.config.in_channels)
        latents = conditioning.reference_latents
        found = (0, expected[1]) if latents is None else tuple(latents.shape)
        if found != expected:
            raise InvalidRequest("REFERENCE_LATENTS", list(found), f"must have shape {list(expected)} for this request")
        branches = {"EMBEDS": conditioning.prompt_embeds}
        if request.guided:
            if conditioning.negative_prompt_embeds is None:
                raise InvalidRequest("NEGATIVE_EMBEDS", None, "are required when TRUE_CFG_SCALE is above 1")
            branches["NEGATIVE_EMBEDS"] = conditioning.negative_prompt_embeds
        width = self.transformer.config.joint_attention_dim
        longest = MAX_POSITION - text_start(grids)
        for field, embeds in branches.items():
            if embeds.ndim != 2 or embeds.shape[1] != width or not 1 <= embeds.shape[0] <= longest:
                allowed = f"must have shape [1 … {longest}, {width}] for this checkpoint and size"
                raise InvalidRequest(field, list(embeds.shape), allowed)
        return tuple(Row(embeds.shape[0], grids) for embeds in branches.values())

    @torch.inference_mode()
    def begin(self, request: ImageRequest, conditioning: Conditioning) -> Denoising:
        """Draw the noise of ``request`` and bring its inputs to the device. Raises as ``rows``."""
        rows = self.rows(request, conditioning)
        grid = rows[0].grids[0]
        channels = self.transformer.config.in_channels // 4
        noise = seeded_noise(request.seed, channels, grid, self.dtype)
        branches = (conditioning.prompt_embeds, conditioning.negative_prompt_embeds)[: len(rows)]
        references = conditioning.reference_latents
        return Denoising(
            request=request,
            embeds=tuple(embeds.to(self.device, self.dtype) for embeds in branches if embeds is not None),
            references=(noise[:0] if references is None else references).to(self.device, self.dtype),
            rows=rows,
            grid=grid,
            sigmas=self.schedule.sigmas(request.num_inference_steps, grid[0] * grid[1]),
            latents=noise.to(self.device).float(),
        )

    @torch.inference_mode()
    def pack(self, members: Sequence[Denoising]) -> Pack:
        """Lay ``members`` (at least one, none of them done) out for the steps they will take together."""
        guided = [member for member in members if len(member.rows) == 2]
        ordered = guided + [member for member in members if len(member.rows) == 1]
        branches = [(member, 0) for member in ordered] + [(member, 1) for member in guided]
        rows = [member.rows[branch] for member, branch in branches]
        bucket = bucket_for(rows, self._graph_tokens)
        padding = bucket.padding(rows) if bucket else []
        zero = [0.0] if self.transformer.config.zero_cond_t else []  # the timestep of reference images
        layout = build_layout(rows + padding, self.device, bucket.tokens if bucket else None, bool(zero))
        steps = min((_MODULATION_CAPACITY - len(zero)) // len(ordered), *(member.steps_left for member in ordered))
        ahead = [member.sigmas[member.step : member.step + steps + 1] for member in ordered]
        sigmas = torch.tensor(ahead, dtype=torch.float32).T  # [K + 1, members]
        # As the reference: the scheduler's timestep in the model's dtype, and only then divided.
        timesteps = (sigmas[:-1] * self.schedule.num_train_timesteps).to(self.dtype) / self.schedule.num_train_timesteps
        slots = torch.tensor(self._modulation.slots([*timesteps.flatten().tolist(), *zero]))
        slots, zero_slots = slots[: timesteps.numel()].view(timesteps.shape), slots[timesteps.numel() :]
        latent_lengths = torch.tensor([len(member.latents) for member in ordered])
        scales = torch.tensor([member.request.true_cfg_scale for member in guided], dtype=torch.float32)
        return Pack(
            members=ordered,
            layout=layout,
            rotary=self.transformer.rotary(layout),
            bucket=bucket,
            text=torch.cat([*(member.embeds[branch] for member, branch in branches), self._blank_text(padding)]),
            image=self._image(branches, padding),
            targets=target_places(rows, self.device),
            latents=torch.cat([member.latents for member in ordered]),
            guided_tokens=int(latent_lengths[: len(guided)].sum()),
            scales=scales.repeat_interleave(latent_lengths[: len(guided)]).unsqueeze(1).to(self.device),
            modulation_slots=torch.cat(
                (
                    slots,
                    slots[:, : len(guided)],
                    slots[:, :1].expand(-1, len(padding)),
                    zero_slots.expand(len(slots), -1),
                ),
                dim=1,
            ).to(self.device),
            sigma_steps=sigmas.diff(dim=0).to(self.device),
            token_members=torch.arange(len(ordered)).repeat_interleave(latent_lengths).to(self.device),
        )

    @torch.inference_mode()
    def velocity(self, pack: Pack) -> Tensor:
        """One packed forward and guidance: what moves ``pack.latents`` at this step, in their shape, fp32."""
        guided = pack.guided_tokens
        latents = pack.latents.to(self.dtype)
        image = pack.image.index_copy(0, pack.targets, torch.cat((latents, latents[:guided])))
        inputs = (image, pack.modulation_slots[pack.next])
        lasting = (pack.text, pack.layout, pack.rotary)
        predicted = self.graphs.run(pack.bucket, inputs, lasting, owner=pack)[pack.targets].float()
        self.graph_replays, self.eager_forwards = self.graphs.replays, self.graphs.eager_steps
        positive, negative = predicted[: len(latents)], predicted[len(latents) :]
        if not guided:
            return positive
        return torch.cat((true_cfg(positive[:guided], negative, pack.scales), positive[guided:]))

    @torch.inference_mode()
    def step(self, pack: Pack) -> None:
        """Advance every member by one step, all or none: if this raises, nobody has moved."""
        velocity = self.velocity(pack)
        sigma_step = pack.sigma_steps[pack.next][pack.token_members].unsqueeze(1)
        pack.latents = pack.latents + sigma_step * velocity
        pack.next += 1
        for member, latents in zip(
            pack.members, pack.latents.split([len(m.latents) for m in pack.members]), strict=True
        ):
            member.before, member.latents = member.latents, latents
            member.step += 1

    def _forward(self, inputs: tuple[Tensor, Tensor], lasting: tuple[Tensor, Layout, PackedRotary]) -> Tensor:
        image, slots = inputs
        text, layout, rotary = lasting
        rows = len(layout.rows)
        references = slots[rows:] if self.transformer.config.zero_cond_t else None
        return self.transformer(image, text, self._modulation.rows(slots[:rows], references), layout, rotary)

    def _blank_text(self, padding: Sequence[Row]) -> Tensor:
        return self._blank(sum(row.text_tokens for row in padding), self.transformer.config.joint_attention_dim)

    def _image(self, branches: Sequence[tuple[Denoising, int]], padding: Sequence[Row]) -> Tensor:
        """The image stream of ``Pack.image``."""
        channels = self.transformer.config.in_channels
        rows = [
            part for member, _ in branches for part in (self._blank(len(member.latents), channels), member.references)
        ]
        return torch.cat((*rows, self._blank(sum(row.image_tokens for row in padding), channels)))

    def _blank(self, tokens: int, width: int) -> Tensor:
        return torch.zeros((tokens, width), dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def preview(self, member: Denoising) -> Callable[[], Tensor]:
        """As ``finish``, for the clean latents x0 = x - sigma · v that the last step predicts."""
        if member.before is None:
            raise ValueError("no step has been taken yet")
        sigma, last = member.sigmas[member.step], member.sigmas[member.step - 1]
        velocity = (member.latents - member.before) / (sigma - last)
        return self.to_host(unpack_latents(member.latents - sigma * velocity, member.grid))

    @torch.inference_mode()
    def finish(self, member: Denoising) -> Callable[[], Tensor]:
        """Start bringing the finished latents to the host; the returned function waits for them, on any thread.

        It returns fp32 [z_dim, 2h, 2w] in the normalised latent space.
        """
        return self.to_host(unpack_latents(member.latents, member.grid))


def load_sampler(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, attention: str, quantization: str
) -> QwenImageSampler:
    """As ``models.families.load_sampler``."""
    config = QwenImageConfig.from_config(checkpoint.transformer_config)
    if quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UnusableError("quantization", "fp8 needs a GPU of compute capability 8.9 or above")
    try:
        varlen = select_attention(attention, device, dtype, config.num_attention_heads, config.attention_head_dim)
    except ValueError as error:
        raise UnusableError("attention", str(error)) from error
    with torch.device("meta"):
        transformer = QwenImageTransformer(config, varlen)
    report = load_component(checkpoint, "transformer", transformer, device, dtype, rename=stored_name)
    logger.info("transformer: %s", report)
    if quantization == "fp8":
        quantize_blocks(transformer.transformer_blocks)
        logger.info("transformer: the linear layers of its blocks are fp8 now")
    return _sampler(checkpoint, transformer, graphs=device.type == "cuda" and varlen.reads_cu_seqlens)


def plan_sampler(checkpoint: Checkpoint) -> QwenImageSampler:
    """As ``models.families.plan_sampler``."""
    with torch.device("meta"):
        transformer = QwenImageTransformer(QwenImageConfig.from_config(checkpoint.transformer_config), SDPA.load())
    return _sampler(checkpoint, transformer, graphs=False)


def _sampler(checkpoint: Checkpoint, transformer: QwenImageTransformer, graphs: bool) -> QwenImageSampler:
    return QwenImageSampler(
        transformer.eval().requires_grad_(False),
        FlowMatchSchedule.from_config(checkpoint.scheduler_config),
        checkpoint.vae_scale_factor * transformer.config.patch_size,
        graphs,
    )
