"""Where ``dit`` runs: on the device that Triton gave the instance, or on several of its own choice (KIND_MODEL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ditpack.tritonserver.parameters import DitSettings, Instance, ParameterError, torch_dtype

if TYPE_CHECKING:
    from ditpack.models.checkpoint import Checkpoint
    from ditpack.parallel.sampler import ParallelSampler
    from ditpack.sampling.sampler import Sampler


def check_kind(instance: Instance, settings: DitSettings) -> None:
    """Raise ParameterError unless ``devices`` is set exactly for KIND_MODEL."""
    if settings.devices and instance.device is not None:
        kind = "KIND_CPU" if instance.device == "cpu" else "KIND_GPU"
        allowed = "must be KIND_MODEL, for the parameter devices is set; or set devices to none"
        raise ParameterError(instance.model, "instance_group.kind", kind, allowed)
    if instance.device is None and not settings.devices:
        raise ParameterError(instance.model, "devices", "none", "must name the devices, for the instance is KIND_MODEL")


def load(instance: Instance, settings: DitSettings, checkpoint: Checkpoint) -> Sampler[Any, Any]:
    """The sampler as configured; ``close`` it, if it has that.

    Raises:
        ParameterError, CheckpointError: it cannot be served as configured.
    """
    from ditpack.models.families import UnusableError, load_sampler

    try:
        if settings.devices:
            return _load_workers(settings, checkpoint)
        device, dtype = instance.torch_target(settings.dtype)
        return load_sampler(checkpoint, device, dtype, settings.attention, settings.quantization)
    except UnusableError as error:
        value = getattr(settings, error.setting)
        if isinstance(value, tuple):
            value = ",".join(name.removeprefix("cuda:") for name in value)
        raise ParameterError(instance.model, error.setting, value, str(error)) from error


def _load_workers(settings: DitSettings, checkpoint: Checkpoint) -> ParallelSampler:
    from ditpack.models.families import UnusableError, plan_sampler
    from ditpack.parallel.messages import WorkerConfig
    from ditpack.parallel.sampler import ParallelSampler
    from ditpack.parallel.ulysses import check_degree

    planner = plan_sampler(checkpoint)
    if settings.parallel == "tokens":
        try:
            check_degree(checkpoint.transformer_config["num_attention_heads"], len(settings.devices))
        except ValueError as error:
            raise UnusableError("devices", f"{error}; or set parallel to rows") from error
    config = WorkerConfig(
        rank=0,
        devices=settings.devices,
        store="",
        checkpoint=checkpoint,
        dtype=torch_dtype(settings.dtype, settings.devices[0].partition(":")[0]),
        attention=settings.attention,
        quantization=settings.quantization,
        parallel=settings.parallel,
        sp_padding=settings.sp_padding,
        collective_timeout_s=2 * settings.worker_timeout_s,
    )
    return ParallelSampler(planner, config, settings.worker_timeout_s, restart=settings.lost_workers == "restart")
