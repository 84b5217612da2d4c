"""Attention over packed rows: one function, several kernels behind it."""

from ditpack.attention.backend import Attention, VarlenAttention
from ditpack.attention.select import select_attention

__all__ = ["Attention", "VarlenAttention", "select_attention"]
