"""Evaluates a small attention model on text. A plain script: Flax and JAX only.

python examples/plain_script.py [--seq 1024] [--batches 4]
"""

import argparse
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, spelled out."""

    heads: int
    head_dim: int

    @nn.compact
    def __call__(self, x):
        seq = x.shape[1]
        project = [
            nn.DenseGeneral((self.heads, self.head_dim), use_bias=False, name=name)
            for name in ("query", "key", "value")
        ]
        q, k, v = (layer(x) for layer in project)  # [B, S, H, D]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * self.head_dim**-0.5
        visible = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
        out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, axis=-1), v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(out)


class Model(nn.Module):
    """Two pre-norm layers over bytes."""

    @nn.compact
    def __call__(self, tokens):
        seq = tokens.shape[1]
        x = nn.Embed(256, 128)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (seq, 128))
        for _ in range(2):
            x = x + SelfAttention(heads=4, head_dim=32)(nn.LayerNorm()(x))
            x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


MODEL = Model()


@jax.jit
def evaluate(params, tokens):
    """Returns the mean next-byte loss of tokens [B, S+1] and its accuracy."""
    logits = MODEL.apply(params, tokens[:, :-1])
    assert isinstance(logits, jax.Array)
    target = tokens[:, 1:]
    log_probs = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(log_probs, target[..., None], axis=-1).mean()
    return loss, (logits.argmax(-1) == target).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    args = parser.parse_args()

    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    windows = text[: args.batches * (args.seq + 1)].reshape(args.batches, 1, -1)
    batches = jnp.asarray(windows, jnp.int32)
    params = MODEL.init(jax.random.key(0), batches[0, :, :-1])
    jax.block_until_ready(evaluate(params, batches[0]))  # compile
    start = time.perf_counter()
    for i, tokens in enumerate(batches):
        loss, accuracy = evaluate(params, tokens)
        print(f"batch {i}: loss {loss:.6f}, accuracy {accuracy:.4f}")
    elapsed = (time.perf_counter() - start) / args.batches
    print(f"{elapsed * 1e3:.1f} ms a batch", file=sys.stderr)


if __name__ == "__main__":
    main()
