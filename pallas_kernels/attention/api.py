"""`attention`: the one function of this package for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.attention.arguments import Window, make_problem
from pallas_kernels.attention.backends import Candidates
from pallas_kernels.attention.differentiable import (
    Call,
    alike_under_shard_map,
    attend,
)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    offset: int = 0,
    window: Window = None,
    softcap: float | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
    deterministic: bool = False,
) -> Any:
    """Computes attention by the fastest implementation that can.

        scores = softcap(scale * q k^T) + bias, where a key is visible; else -inf
        out = softmax(scores) v

    Key j is visible to query i if `mask` is true there, both are in one segment and
    below their lengths, and j - (i + offset) is within the window and, if `causal`,
    not positive. A query that sees no key has the result 0 and no gradient.

    The layout is that of `jax.nn.dot_product_attention`, with any number of batch
    dims, none included. Gradients of q, k, v, bias and sinks, jit, vmap, scan,
    `jax.checkpoint` and `jax.shard_map` (batch and heads sharded) all work.
    Products of float32 operands are float32 products on every device.

    Args:
      q: queries [..., T, H, D] in bfloat16, float16, float32 or float64.
      k: keys [..., S, K, D] in the same dtype; K divides H, and query head h belongs
        to key-value head h // (H / K).
      v: values [..., S, K, Dv] in the same dtype.
      bias: added to the scaled scores; broadcasts to [..., H, T, S]. Hide keys with
        `mask`: a query all of whose keys have a bias like -1e9 has a gradient of NaN,
        unless its cotangent is 0.
      mask: bool, True where a key is visible; broadcasts to [..., H, T, S].
      scale: factor of the scores; by default 1 / sqrt(D).
      causal: whether a query sees no key after its own position.
      offset: position of query 0 among the keys, for instance S - T where the
        queries are the last ones.
      window: (left, right): how many keys before and after its own position a query
        sees, None for no limit; one number for both.
      softcap: c of c * tanh(x / c), put around the scaled scores before the bias.
      q_segment_ids: integers [..., T]; a query sees the keys of its segment only.
      kv_segment_ids: integers [..., S]; needed if the other is given.
      q_lengths: integers [...]: how many queries there are; the rest is padding.
      kv_lengths: integers [...]: how many keys there are.
      sinks: [H], a logit of each head that joins the sum of its softmax and has no
        value.
      return_lse: whether to return the logsumexp of the scores too.
      implementation: a name, or names in the order in which to try them, of
        "tpu", "cudnn", "online", "reference" and others in
        `pallas_kernels.attention.backends.BACKENDS`. None tries all that are for the
        device, fastest first. A single name is run on any device, as when a kernel
        is interpreted or compiled for another one.
      config: choices of a kernel (its block sizes); only with a single name. None
        leaves them to the implementation.
      deterministic: whether two runs must give gradients that agree bit for bit.

    Returns:
      out [..., T, H, Dv] in the dtype of q; with `return_lse` a pair of it and the
      logsumexp [..., H, T] in float32 (float64 for float64), -inf for a query that
      sees no key. Both are differentiable.

    Raises:
      TypeError: an argument has a wrong type or dtype.
      ValueError: a wrong shape or value.
      hlo_tools.errors.UnknownNameError: no implementation has that name.
      hlo_tools.errors.UnsupportedError: none of them can compute this; the message
        has the reason of each.
    """
    problem, operands = make_problem(
        q, k, v, bias=bias, mask=mask, scale=scale, causal=causal, offset=offset,
        window=window, softcap=softcap, q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids, q_lengths=q_lengths, kv_lengths=kv_lengths,
        sinks=sinks,
    )  # fmt: skip
    candidates = Candidates.of(implementation)
    if config is not None and not candidates.insists:
        raise ValueError(
            "config: is for one implementation, expected implementation='name' with"
            f" it, got implementation={implementation!r}"
        )
    call = Call(problem, candidates, config, return_lse, deterministic)
    results: Any = attend(call, alike_under_shard_map(operands))
    out, lse = results
    out = out.reshape(*q.shape[:-1], problem.value_dim)
    if not return_lse:
        return out
    return out, lse.reshape(*q.shape[:-3], problem.heads, problem.q_len)
