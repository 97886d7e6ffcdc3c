"""A language model in the style of Flax's NNX examples: nnx.MultiHeadAttention,
a causal mask, nnx.jit and nnx.Optimizer, on bytes of the standard library's help text.
"""

import argparse
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS = 256, 64, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=DIM, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(DIM, rngs=rngs)
        self.linear1 = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.linear2 = nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.linear2(nnx.gelu(self.linear1(self.norm2(x))))


class TransformerLM(nnx.Module):
    def __init__(self, seq, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.positions = nnx.Embed(seq, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, metrics, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, tokens):
    return loss_fn(model, tokens)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    args = parser.parse_args()
    text = np.frombuffer("".join(topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(0)

    def batch(size):
        starts = rng.integers(0, len(text) - args.seq - 1, size)
        windows = [text[s : s + args.seq + 1] for s in starts]
        return jnp.asarray(np.stack(windows), jnp.int32)

    model = TransformerLM(args.seq, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    held_out = batch(2)
    for step in range(args.steps):
        train_step(model, optimizer, metrics, batch(4))
        print(f"step {step} train_loss {metrics.compute()['loss']!s}")
        metrics.reset()
    model.eval()
    print(f"eval_loss {eval_step(model, held_out)!s}")
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    print(f"checksum {sum(np.square(x, dtype=np.float64).sum() for x in leaves)!s}")


if __name__ == "__main__":
    main()
