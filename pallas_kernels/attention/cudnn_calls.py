"""cuDNN's fused attention as custom calls: forward, forward in training, backward.

`jax.nn.dot_product_attention(implementation="cudnn")` emits the same calls, but looks
for a GPU and for cuDNN on the machine at hand first, and wraps them in a custom
partitioning whose Python callback does not survive in a module's text. A site must
lower on any machine, so the calls are made here, by the public `jax.ffi`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HALF_DTYPES = {"bfloat16": "BF16", "float16": "F16"}
# q, k, v, out are [B,T|S,H|K,D]; scores and probabilities are [B,H,T,S].
# name -> (contracted, contracted, batch, batch) dims of left and right operand
FORWARD_PRODUCTS = {
    "bmm1_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),  # q k -> scores
    "bmm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),  # probs v -> out
}
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),  # dscores q -> dk
    "bmm1_grad_gemm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),  # dscores k -> dq
    "bmm2_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),  # probs dout -> dv
    "bmm2_grad_gemm2_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),  # dout v -> dprobs
}


class Gradients(NamedTuple):
    """What cuDNN's backward pass returns.

    Attributes:
      dq: [B,T,H,D].
      dk: [B,S,K,D].
      dv: [B,S,K,Dv].
      dbias: of the bias's shape; None if it was not asked for.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dbias: jax.Array | None


def custom_call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    scale: float,
    causal: bool,
    window: int,
) -> jax.Array:
    """Calls cuDNN's forward pass.

    Args:
      q: [B,T,H,D] in bfloat16 or float16.
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      bias: [B|1,H|1,T,S], or None.
      scale: factor of the scores.
      causal: top left.
      window: length of the sliding window, or 0.

    Returns:
      [B,T,H,Dv] in the dtype of q.
    """
    b, t, h, _ = q.shape
    config = backend_config(q, k, scale, causal, window, FORWARD_PRODUCTS)
    results = [_transposed((b, h, t, v.shape[-1]), q.dtype)]
    operands = [q, k, v] if bias is None else [q, k, v, bias]
    (out,) = _call(_target(bias), operands, results, config)
    return jnp.transpose(out, (0, 2, 1, 3))


def training_call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    """Calls cuDNN's forward pass as `custom_call` does, and keeps the statistics.

    Returns:
      [B,T,H,Dv] in the dtype of q, and the logsumexp of the rows, float32 [B,H,T].
    """
    b, t, h, _ = q.shape
    config = backend_config(q, k, scale, causal, window, FORWARD_PRODUCTS)
    results = [
        _transposed((b, h, t, v.shape[-1]), q.dtype),
        _row_major((b, h, t), jnp.float32),
    ]
    operands = [q, k, v] if bias is None else [q, k, v, bias]
    out, statistics = _call(_target(bias), operands, results, config)
    return jnp.transpose(out, (0, 2, 1, 3)), statistics


def backward_call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    out: jax.Array,
    statistics: jax.Array,
    dout: jax.Array,
    scale: float,
    causal: bool,
    window: int,
    wants_dbias: bool,
) -> Gradients:
    """Calls cuDNN's backward pass.

    Args:
      q: [B,T,H,D] in bfloat16 or float16; so are all but the bias and statistics.
      k: [B,S,K,D].
      v: [B,S,K,Dv].
      bias: [B|1,H|1,T,S], or None.
      out: [B,T,H,Dv], from `training_call`.
      statistics: float32 [B,H,T], from there too.
      dout: [B,T,H,Dv].
      scale: factor of the scores.
      causal: top left.
      window: length of the sliding window, or 0.
      wants_dbias: whether the gradient of the bias is computed.

    Returns:
      The gradients, all in the dtype of q: cuDNN writes that of a float32 bias in
      it too.
    """
    config = backend_config(q, k, scale, causal, window, BACKWARD_PRODUCTS)
    results = [
        _transposed((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in (q, k, v)
    ]
    operands = [q, k, v, statistics, dout]
    if bias is not None:
        operands.append(bias)
        if wants_dbias:
            results.append(_row_major(bias.shape, q.dtype))
    operands.append(out)
    grads = _call(_target(bias) + "Backward", operands, results, config)
    dq, dk, dv = (jnp.transpose(x, (0, 2, 1, 3)) for x in grads[:3])
    return Gradients(dq, dk, dv, grads[3] if len(grads) > 3 else None)


def _target(bias: jax.Array | None) -> str:
    return "__cudnn$fmhaSoftmax" if bias is None else "__cudnn$fmhaScaleBiasSoftmax"


class _Result(NamedTuple):
    """A result of a call; its layout is dims from major to minor."""

    shape: tuple[int, ...]
    dtype: Any
    layout: tuple[int, ...]


def _row_major(shape: tuple[int, ...], dtype: Any) -> _Result:
    return _Result(shape, dtype, tuple(range(len(shape))))


def _transposed(shape: tuple[int, ...], dtype: Any) -> _Result:
    """[B,H,T,D] laid out as [B,T,H,D], so that transposing it so is free."""
    return _Result(shape, dtype, (0, 2, 1, 3))


def _call(
    target: str,
    operands: Sequence[jax.Array],
    results: list[_Result],
    config: dict[str, Any],
) -> list[jax.Array]:
    """Makes a call, with the workspace that all have as a last result."""
    results = [*results, _row_major((0,), jnp.uint8)]  # XLA finds out its size
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        output_layouts=[x.layout for x in results],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    return list(call(*operands))[:-1]


def backend_config(
    q: jax.Array,
    k: jax.Array,
    scale: float,
    causal: bool,
    window: int,
    products: dict[str, tuple],
) -> dict[str, Any]:
    """Returns the call's configuration: XLA's GpuBackendConfig proto, as JSON."""
    b, t, h, _ = q.shape
    s = k.shape[1]
    return {
        "operation_queue_id": "0",
        "cudnn_fmha_backend_config": {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": scale,
            "intermediate_tensor_shape": _score_shape(q.dtype, (b, h, t, s)),
            "is_flash_attention": True,
            "mask_type": "CAUSAL" if causal else "NO_MASK",
            **{name: _dot_numbers(*dims) for name, dims in products.items()},
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": window,
            "max_seg_per_batch": 1,
            "is_paged_attention": False,
        },
    }


def _score_shape(dtype: jnp.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "element_type": HALF_DTYPES[str(dtype)],
        "dimensions": [str(n) for n in shape],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }


def _dot_numbers(lhs: int, rhs: int, lhs_batch, rhs_batch) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(lhs)],
        "rhs_contracting_dimensions": [str(rhs)],
        "lhs_batch_dimensions": [str(i) for i in lhs_batch],
        "rhs_batch_dimensions": [str(i) for i in rhs_batch],
    }
