"""ditpack: diffusion transformers on NVIDIA Triton, packed at every denoising step."""

__version__ = "0.1.0"
