"""Trains an Equinox transformer to sort short sequences, in Equinox's own style:
single-example modules under vmap, filter_value_and_grad, filter_jit, dropout keys.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

VOCAB, SEQ, DIM, HEADS = 32, 64, 64, 4


class Layer(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        akey, mkey = jr.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(DIM), eqx.nn.LayerNorm(DIM)
        self.attention = eqx.nn.MultiheadAttention(HEADS, DIM, key=akey)
        self.mlp = eqx.nn.MLP(DIM, DIM, 4 * DIM, 1, jax.nn.gelu, key=mkey)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key=None, inference=False):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))
        return x + self.dropout(y, key=key, inference=inference)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    positions: jax.Array
    layers: list[Layer]
    head: eqx.nn.Linear

    def __init__(self, key):
        ekey, pkey, hkey, *lkeys = jr.split(key, 5)
        self.embed = eqx.nn.Embedding(VOCAB, DIM, key=ekey)
        self.positions = 0.02 * jr.normal(pkey, (SEQ, DIM))
        self.layers = [Layer(k) for k in lkeys]
        self.head = eqx.nn.Linear(DIM, VOCAB, key=hkey)

    def __call__(self, tokens, key=None, inference=False):
        x = jax.vmap(self.embed)(tokens) + self.positions
        keys = [None] * len(self.layers) if key is None else jr.split(key, 2)
        for layer, k in zip(self.layers, keys, strict=True):
            x = layer(x, k, inference)
        return jax.vmap(self.head)(x)


@eqx.filter_value_and_grad
def compute_loss(model, x, y, key):
    logits = jax.vmap(model)(x, jr.split(key, x.shape[0]))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def make_step(model, x, y, key, optim, opt_state):
    loss, grads = compute_loss(model, x, y, key)
    params = eqx.filter(model, eqx.is_array)
    updates, opt_state = optim.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


@eqx.filter_jit
def evaluate(model, x, y):
    logits = jax.vmap(lambda t: model(t, inference=True))(x)
    return jnp.mean(jnp.argmax(logits, -1) == y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    key, model_key = jr.split(jr.key(0))
    model = Transformer(model_key)
    optim = optax.adamw(3e-3)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    for step in range(args.steps):
        x = rng.integers(0, VOCAB, (16, SEQ))
        key, step_key = jr.split(key)
        model, opt_state, loss = make_step(
            model, x, np.sort(x, axis=-1), step_key, optim, opt_state
        )
        print(f"step {step} loss {loss!s}")
    x = rng.integers(0, VOCAB, (16, SEQ))
    print(f"accuracy {evaluate(model, x, np.sort(x, axis=-1))!s}")
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    print(f"checksum {sum(np.square(v, dtype=np.float64).sum() for v in leaves)!s}")


if __name__ == "__main__":
    main()
