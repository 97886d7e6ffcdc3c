"""An Optax training loop: MLP regression, one epoch of steps inside lax.scan."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax


def init_mlp(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def mlp(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def make_epoch(optimizer):
    def loss_fn(params, batch):
        x, y = batch
        return optax.l2_loss(mlp(params, x), y).mean()

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    @jax.jit
    def epoch(carry, batches):
        return jax.lax.scan(step, carry, batches)

    return epoch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (32, 64, 3)).astype(np.float32)  # [steps, batch, features]
    y = np.sin(x[..., :1] * x[..., 1:2]) + 0.5 * x[..., 2:]
    schedule = optax.cosine_decay_schedule(1e-2, args.epochs * 32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    params = init_mlp(jax.random.key(0), [3, 64, 64, 1])
    carry, epoch = (params, optimizer.init(params)), make_epoch(optimizer)
    for i in range(args.epochs):
        carry, losses = epoch(carry, (x, y))
        print(f"epoch {i} first_loss {losses[0]!s} last_loss {losses[-1]!s}")
    leaves = jax.tree.leaves(carry[0])
    print(f"checksum {sum(np.square(v, dtype=np.float64).sum() for v in leaves)!s}")


if __name__ == "__main__":
    main()
