"""The implementations that benchmarks/attention.py compares.

A contender is a function (row, arrays) -> out [B,T,H,D], called as a user calls it; it
raises NotImplementedError where its interface has no form for what the row asks.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from attention_rows import Arrays, Row

from pallas_kernels import attention

Call = Callable[[Row, Arrays], jax.Array]


@dataclass(frozen=True)
class Contender:
    """One way to compute attention.

    Attributes:
      call: computes a row.
      platforms: where it is measured unless it is asked for, of "cpu", "gpu", "tpu".
      ours: whether an error of it, other than a refusal, is ours to answer for.
      needs: a module that must be there, or None.
    """

    call: Call
    platforms: tuple[str, ...]
    ours: bool = False
    needs: str | None = None

    def missing(self) -> str | None:
        """Returns why it can not be called, or None."""
        if self.needs is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(self.needs)
        except ImportError as error:
            return f"can not be imported: {error}"
        return None


def _ours(implementation: str) -> Call:
    def call(row: Row, arrays: Arrays) -> jax.Array:
        return attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            bias=arrays.get("bias"),
            mask=arrays.get("mask"),
            causal=row.causal,
            window=None if row.window is None else (row.window, None),
            softcap=row.softcap,
            q_segment_ids=arrays.get("segments"),
            kv_segment_ids=arrays.get("segments"),
            implementation=implementation,
        )

    return call


def _mask_of(row: Row, arrays: Arrays) -> jax.Array | None:
    """Returns the mask of a row for those who know no segments."""
    if not row.segments:
        return arrays.get("mask")
    ids = arrays["segments"]
    return ids[:, None, :, None] == ids[:, None, None, :]


def _jax_nn(implementation: str) -> Call:
    def call(row: Row, arrays: Arrays) -> jax.Array:
        if row.softcap is not None:
            raise NotImplementedError("jax.nn.dot_product_attention has no softcap")
        mask = _mask_of(row, arrays)
        if implementation == "cudnn" and mask is not None:
            # it takes no mask [B,1,1,S], so a user has to write it out
            mask = jnp.broadcast_to(mask, (row.batch, 1, row.length, row.length))
        return jax.nn.dot_product_attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            bias=arrays.get("bias"),
            mask=mask,
            is_causal=row.causal,
            local_window_size=None if row.window is None else (row.window, 0),
            implementation=implementation,  # pyright: ignore[reportArgumentType]
        )

    return call


def _tokamax(row: Row, arrays: Arrays) -> jax.Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tokamax
    return tokamax.dot_product_attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        bias=arrays.get("bias"),
        mask=_mask_of(row, arrays),
        is_causal=row.causal,
        local_window_size=None if row.window is None else (row.window, 0),
        logits_soft_cap=row.softcap,
        implementation="mosaic",
    )


# In the order of the table; ratios are to those of `BASELINES`.
CONTENDERS: dict[str, Contender] = {
    "mosaic-gpu": Contender(_ours("mosaic-gpu"), ("gpu",), ours=True),
    "tpu": Contender(_ours("tpu"), ("tpu",), ours=True),
    "online": Contender(_ours("online"), ("cpu",), ours=True),
    "reference": Contender(_ours("reference"), ("cpu",), ours=True),
    "cudnn": Contender(_jax_nn("cudnn"), ("gpu",)),
    "tokamax": Contender(_tokamax, ("gpu",), needs="tokamax"),
    "xla": Contender(_jax_nn("xla"), ("cpu", "gpu", "tpu")),
}
BASELINES = ("cudnn", "tokamax", "xla")
