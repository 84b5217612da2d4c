"""The flow-matching Euler schedule of Qwen-Image as plain numbers.

Source: diffusers ``FlowMatchEulerDiscreteScheduler.set_timesteps`` with the sigmas and the shift that
``QwenImagePipeline`` passes. The arithmetic is float32, as there, so the numbers are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Options of the scheduler's config that would change the schedule and that no Qwen-Image checkpoint uses.
_UNSUPPORTED = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
    "stochastic_sampling": False,
}


@dataclass(frozen=True, slots=True)
class FlowMatchSchedule:
    """The numbers of a checkpoint's scheduler_config.json."""

    num_train_timesteps: int = 1000
    shift: float = 1.0
    use_dynamic_shifting: bool = False
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None
    time_shift_type: str = "exponential"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FlowMatchSchedule:
        """Read a diffusers scheduler config.

        Raises:
            ValueError: for an option that would change the schedule in a way not implemented here.
        """
        for key, allowed in _UNSUPPORTED.items():
            if config.get(key, allowed) != allowed:
                raise ValueError(f"scheduler_config.json: {key} = {config[key]!r}: only {allowed!r} is supported")
        known = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        schedule = cls(**known)
        if schedule.time_shift_type not in ("exponential", "linear"):
            raise ValueError(
                f"scheduler_config.json: time_shift_type = {schedule.time_shift_type!r}: must be exponential or linear"
            )
        return schedule

    def sigmas(self, steps: int, image_tokens: int) -> list[float]:
        """The noise levels of ``steps`` steps: ``steps`` + 1 float32 values, the last 0.

        ``image_tokens`` counts the target alone; the shift depends on it, so each request has a schedule of its own.
        """
        sigmas = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
        if self.use_dynamic_shifting:
            mu = self._mu(image_tokens)
            weight = math.exp(mu) if self.time_shift_type == "exponential" else mu
            sigmas = weight / (weight + (1 / sigmas - 1))
        else:
            sigmas = self.shift * sigmas / (1 + (self.shift - 1) * sigmas)
        # A single step starts and ends at sigma 1; there is nothing to stretch (diffusers divides by zero here).
        if self.shift_terminal and steps > 1:
            rest = 1 - sigmas
            sigmas = 1 - rest / (rest[-1] / (1 - self.shift_terminal))
        return [*(float(sigma) for sigma in sigmas.astype(np.float32)), 0.0]

    def _mu(self, image_tokens: int) -> float:
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return image_tokens * slope + (self.base_shift - slope * self.base_image_seq_len)
