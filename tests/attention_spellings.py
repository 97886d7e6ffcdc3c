"""Ways in which people write attention, and things that only look like it.

Each spelling is a function of (q, k, v) [B,T,H,D] (or of what `inputs` names) that
holds exactly one attention site.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, H, K, D = 2, 24, 40, 4, 2, 16
SPELLINGS: dict[str, "Spelling"] = {}
DECOYS: dict[str, "Spelling"] = {}


@dataclass(frozen=True)
class Spelling:
    """A function and the shapes of its arguments."""

    function: Callable
    shapes: tuple[tuple, ...]
    causal: bool | None = None


def spelling(*shapes, table=SPELLINGS, causal=None):
    def add(function):
        default = ((B, T, H, D), (B, T, H, D), (B, T, H, D))
        table[function.__name__] = Spelling(function, shapes or default, causal)
        return function

    return add


def decoy(*shapes):
    return spelling(*shapes, table=DECOYS)


def scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / float(np.sqrt(q.shape[-1]))


def weighted(p, v):
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


CROSS = ((B, T, H, D), (B, S, H, D), (B, S, H, D))
GQA = ((B, T, H, D), (B, T, K, D), (B, T, K, D))


@spelling()
def plain(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k)), v)


@spelling(*CROSS)
def cross(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k)), v)


@spelling(causal=True)
def causal_tril_where(q, k, v):
    mask = jnp.tril(jnp.ones((T, T), bool))
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(causal=True)
def causal_triu_additive(q, k, v):
    mask = jnp.triu(jnp.full((T, T), -1e30), k=1)
    return weighted(jax.nn.softmax(scores(q, k) + mask), v)


@spelling(causal=True)
def causal_numpy_constant(q, k, v):
    mask = np.tril(np.ones((T, T), bool))
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -jnp.inf)), v)


@spelling(causal=True)
def causal_arange_greater(q, k, v):
    hidden = jnp.arange(T)[None, :] > jnp.arange(T)[:, None]
    return weighted(jax.nn.softmax(jnp.where(hidden, -1e30, scores(q, k))), v)


@spelling(causal=True)
def causal_not_difference(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    mask = jnp.logical_not(i - j < 0)
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(causal=True)
def causal_added_float_mask(q, k, v):
    mask = jnp.tril(jnp.ones((T, T)))
    return weighted(jax.nn.softmax(scores(q, k) + (1 - mask) * -1e30), v)


@spelling(*CROSS, causal=True)
def causal_with_offset(q, k, v):
    mask = jnp.tril(jnp.ones((T, S), bool), k=S - T)
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(causal=True)
def sliding_window(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    mask = (j <= i) & (i - j < 7)
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(causal=False)
def window_absolute_distance(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    mask = jnp.abs(i - j) <= 5
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(causal=False)
def block_diagonal(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    return weighted(jax.nn.softmax(jnp.where(i // 8 == j // 8, scores(q, k), -1e30)), v)


@spelling(*CROSS, (B, S))
def padding_mask(q, k, v, lengths):
    mask = (lengths > 0)[:, None, None, :]
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(*CROSS, (B, S))
def padding_mask_infinite(q, k, v, lengths):
    mask = (lengths > -5)[:, None, None, :]
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -jnp.inf)), v)


@spelling(*CROSS, (B, 1, T, S))
def moderate_fill(q, k, v, mask):
    return weighted(jax.nn.softmax(jnp.where(mask > 0, scores(q, k), -10.0)), v)


@spelling(*CROSS, (B, 1, T, S))
def zero_fill(q, k, v, mask):
    return weighted(jax.nn.softmax(jnp.where(mask > 0, scores(q, k), 0.0)), v)


@spelling(*CROSS, (H, T, S))
def bias_per_head(q, k, v, bias):
    return weighted(jax.nn.softmax(scores(q, k) + bias), v)


@spelling(*CROSS, (B, 1, T, S))
def bias_negated_after_scale(q, k, v, bias):
    s = (jnp.einsum("bqhd,bkhd->bhqk", q, k) - bias) * 0.25
    return weighted(jax.nn.softmax(s), v)


@spelling()
def alibi(q, k, v):
    slopes = 2.0 ** (-jnp.arange(1, H + 1, dtype=jnp.float32) * 8 / H)
    distance = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
    return weighted(jax.nn.softmax(scores(q, k) + slopes[:, None, None] * distance), v)


@spelling()
def softcap(q, k, v):
    return weighted(jax.nn.softmax(20.0 * jnp.tanh(scores(q, k) / 20.0)), v)


@spelling(causal=True)
def softcap_causal(q, k, v):
    s = 20.0 * jnp.tanh(scores(q, k) / 20.0)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    return weighted(jax.nn.softmax(s), v)


@spelling()
def clipped_scores(q, k, v):
    return weighted(jax.nn.softmax(jnp.clip(scores(q, k), -1.0, 1.0)), v)


@spelling(*GQA)
def gqa_repeat(q, k, v):
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    return weighted(jax.nn.softmax(scores(q, k)), v)


@spelling(*GQA)
def gqa_broadcast(q, k, v):
    def widen(x):
        x = jnp.broadcast_to(x[:, :, :, None], (B, T, K, H // K, D))
        return x.reshape(B, T, H, D)

    return weighted(jax.nn.softmax(scores(q, widen(k))), widen(v))


@spelling(*GQA)
def gqa_tile(q, k, v):
    k, v = (jnp.tile(x, (1, 1, H // K, 1)) for x in (k, v))
    return weighted(jax.nn.softmax(scores(q, k)), v)


@spelling(*GQA, causal=True)
def gqa_grouped(q, k, v):
    q = q.reshape(B, T, K, H // K, D)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k) * D**-0.5
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    o = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(s), v)
    return o.reshape(B, T, H, D)


@spelling((B, T, H, D), (B, S, D), (B, S, D))
def mqa(q, k, v):
    s = jnp.einsum("bqhd,bkd->bhqk", q, k)
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(s), v)


@spelling((B, H, T, D), (B, H, S, D), (B, H, S, D))
def bhtd(q, k, v):
    s = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(jnp.float32(D))
    return jax.nn.softmax(s) @ v


@spelling((B, H, T, D), (B, H, D, S), (B, H, S, D))
def keys_transposed(q, k, v):
    return jax.nn.softmax(q @ k) @ v


@spelling()
def merged_batch_heads(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, T, D) for x in (q, k, v))
    o = jax.nn.softmax(q @ k.transpose(0, 2, 1)) @ v
    return o.reshape(B, H, T, D).transpose(0, 2, 1, 3)


@spelling()
def merged_with_split_mask(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, T, D) for x in (q, k, v))
    s = (q @ k.transpose(0, 2, 1)).reshape(B, H, T, T)
    s = s + jnp.arange(B * T, dtype=jnp.float32).reshape(B, 1, 1, T)
    o = jax.nn.softmax(s).reshape(B * H, T, T) @ v
    return o.reshape(B, H, T, D)


@spelling((T, D), (S, D), (S, D))
def single_head(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


@spelling()
def vmapped(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T / 4.0) @ v

    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


@spelling()
def vmapped_heads_first(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T / 4.0) @ v

    return jax.vmap(jax.vmap(one), in_axes=2, out_axes=2)(q, k, v)


@spelling((B, H, D), (B, S, H, D), (B, S, H, D), ())
def decode(q, k, v, index):
    s = jnp.einsum("bhd,bshd->bhs", q, k) * 0.25
    s = jnp.where(jnp.arange(S) <= jnp.abs(index).astype(int), s, -1e30)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(s), v)


@spelling((B, 1, H, D), (B, S, K, D), (B, S, K, D), (B,))
def decode_gqa_lengths(q, k, v, lengths):
    q = q.reshape(B, K, H // K, D)
    s = jnp.einsum("bkgd,bskd->bkgs", q, k)
    visible = jnp.arange(S)[None] < (jnp.abs(lengths) * 9 + 1)[:, None]
    s = jnp.where(visible[:, None, None], s, -1e30)
    return jnp.einsum("bkgs,bskd->bkgd", jax.nn.softmax(s), v)


@spelling()
def scale_on_q(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    return weighted(jax.nn.softmax(s), v)


@spelling()
def scale_on_k(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k / 4.0)
    return weighted(jax.nn.softmax(s), v)


@spelling()
def scale_split(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.25, k * D**-0.25)
    return weighted(jax.nn.softmax(s), v)


@spelling()
def no_max_subtraction(q, k, v):
    e = jnp.exp(scores(q, k))
    return weighted(e / e.sum(-1, keepdims=True), v)


@spelling()
def max_with_gradient(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weighted(e / e.sum(-1, keepdims=True), v)


@spelling()
def reciprocal_of_sum(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weighted(e * (1.0 / e.sum(-1, keepdims=True)), v)


@spelling()
def late_division(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1).transpose(0, 2, 1)[..., None]
    return weighted(e, v) / total


@spelling()
def exp_log_softmax(q, k, v):
    return weighted(jnp.exp(jax.nn.log_softmax(scores(q, k))), v)


@spelling()
def exp_minus_logsumexp(q, k, v):
    s = scores(q, k)
    p = jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True))
    return weighted(p, v)


@spelling()
def value_dim_differs(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k)), v[..., : D // 2])


@spelling((B, 3, T, H, D))
def packed_qkv(qkv):
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    return weighted(jax.nn.softmax(scores(q, k)), v)


@spelling()
def same_keys_and_values(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k)), k)


@spelling((B, T, H, D))
def attends_to_itself(x, *_):
    return weighted(jax.nn.softmax(scores(x, x)), x)


@spelling(*CROSS, (B, T), (B, S))
def segment_ids(q, k, v, a, b):
    same = jnp.sign(a)[:, None, :, None] == jnp.sign(b)[:, None, None, :]
    return weighted(jax.nn.softmax(jnp.where(same, scores(q, k), -1e30)), v)


@spelling(*CROSS, (B, 1, 1, S), causal=True)
def causal_and_padding(q, k, v, padding):
    mask = jnp.tril(jnp.ones((T, S), bool)) & (padding > -1)
    return weighted(jax.nn.softmax(jnp.where(mask, scores(q, k), -1e30)), v)


@spelling(*CROSS, (B, 1, 1, S), causal=True)
def causal_then_padding(q, k, v, padding):
    s = jnp.where(jnp.tril(jnp.ones((T, S), bool)), scores(q, k), -1e30)
    s = jnp.where(padding > -1, s, -1e30)
    return weighted(jax.nn.softmax(s), v)


@spelling((B, H, T // 8, 8, D), (B, H, S, D), (B, H, S, D))
def two_query_axes(q, k, v):
    s = jnp.einsum("bhncd,bhsd->bhncs", q, k)
    return jnp.einsum("bhncs,bhsd->bhncd", jax.nn.softmax(s), v)


@spelling((B, T, H, D), (B, T, 6, D), (B, T, 6, D))
def keys_per_query(q, k, v):
    s = jnp.einsum("bthd,btsd->bths", q, k)
    return jnp.einsum("bths,btsd->bthd", jax.nn.softmax(s), v)


@spelling((B, T, H, D), (B, 5, 8, H, D), (B, 5, 8, H, D))
def two_key_axes(q, k, v):
    s = jnp.einsum("bqhd,bxyhd->bhqxy", q, k)
    p = jax.nn.softmax(s.reshape(B, H, T, 40)).reshape(s.shape)
    return jnp.einsum("bhqxy,bxyhd->bqhd", p, v)


@spelling((B, T, H, D), (B, 5, 8, H, D), (B, 5, 8, H, D))
def softmax_over_two_axes(q, k, v):
    s = jnp.einsum("bqhd,bxyhd->bhqxy", q, k)
    return jnp.einsum("bhqxy,bxyhd->bqhd", jax.nn.softmax(s, axis=(-1, -2)), v)


@spelling(GQA[0], GQA[1], GQA[0])
def keys_repeated_only(q, k, v):
    return weighted(jax.nn.softmax(scores(q, jnp.repeat(k, H // K, axis=2))), v)


@spelling((B, T, H, D), (B, S, H, D), (B, S, H, D), (H, T, D), (S, D))
def second_product_as_bias(q, k, v, r, e):
    bias = jnp.einsum("htd,sd->hts", r, e)
    return weighted(jax.nn.softmax(scores(q, k) + bias), v)


@spelling()
def checkpointed(q, k, v):
    return jax.checkpoint(plain)(q, k, v)


@spelling()
def inner_jit(q, k, v):
    return jax.jit(plain)(q, k, v)


@spelling((3, B, T, H, D), (B, T, H, D))
def scanned(layers, x):
    def body(x, w):
        return x + weighted(jax.nn.softmax(scores(x * w, x)), x), None

    return jax.lax.scan(body, x, layers)[0]


@spelling((3, B, T, H, D), (B, T, H, D), causal=True)
def scanned_with_mask_outside(layers, x):
    mask = jnp.tril(jnp.ones((T, T), bool))

    def body(x, w):
        s = jnp.where(mask, scores(x * w, x), -1e30)
        return x + weighted(jax.nn.softmax(s), x), None

    return jax.lax.scan(body, x, layers)[0]


@spelling()
def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@spelling(*GQA, causal=True)
def library_causal_gqa(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


# ------------------------------------------------------------------- decoys


@decoy()
def softmax_over_queries(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k), axis=2), v)


@decoy()
def softmax_over_heads(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k), axis=1), v)


@decoy()
def sum_over_more_than_keys(q, k, v):
    e = jnp.exp(scores(q, k))
    return weighted(e / e.sum((-1, -2), keepdims=True), v)


@decoy()
def epsilon_in_denominator(q, k, v):
    e = jnp.exp(scores(q, k))
    return weighted(e / (1e-3 + e.sum(-1, keepdims=True)), v)


@decoy()
def softmax_plus_one(q, k, v):
    e = jnp.exp(scores(q, k))
    return weighted(e / (1.0 + e.sum(-1, keepdims=True)), v)


@decoy()
def sum_of_other_exponentials(q, k, v):
    s = scores(q, k)
    return weighted(jnp.exp(s) / jnp.exp(2.0 * s).sum(-1, keepdims=True), v)


@decoy()
def shift_differs_along_keys(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-2, keepdims=True))
    total = jnp.exp(s).sum(-1, keepdims=True)
    return weighted(e / total, v)


@decoy()
def squared_probabilities(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k)) ** 2, v)


@decoy()
def transposed_probabilities(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    return weighted(p.transpose(0, 1, 3, 2), v)


@decoy()
def reversed_probabilities(q, k, v):
    return weighted(jax.nn.softmax(scores(q, k))[..., ::-1], v)


@decoy()
def relative_shift(q, k, v):
    s = scores(q, k)
    return weighted(jax.nn.softmax(s + s.transpose(0, 1, 3, 2)), v)


@decoy()
def sigmoid(q, k, v):
    return weighted(jax.nn.sigmoid(scores(q, k)), v)


@decoy()
def linear_attention(q, k, v):
    kv = jnp.einsum("bkhd,bkhe->bhde", jnp.exp(k), v)
    return jnp.einsum("bqhd,bhde->bqhe", jnp.exp(q), kv)


@decoy()
def sum_with_wrong_start(q, k, v):
    e = jnp.exp(scores(q, k))
    total = jax.lax.reduce(e, np.float32(0.5), jax.lax.add, (3,))[..., None]
    return weighted(e / total, v)


@decoy((B, T, D), (D, 8), (B, T, 8, D))
def router(x, w, experts):
    gate = jax.nn.softmax(x @ w)
    return jnp.einsum("bte,bted->btd", gate, experts)


@decoy((B, T, D), (D, 50), (B, T))
def cross_entropy_gradient(x, w, labels):
    def loss(x):
        logits = x @ w
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), labels.astype(int)[..., None], -1
        )
        return -picked.mean()

    return jax.grad(loss)(x)
