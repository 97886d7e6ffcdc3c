"""Three patterns of one's own, found in a Flax model that knows nothing of them.

Each pattern is two JAX functions: what the program computes, and what is to compute
it instead. Forward and backward are found, checked on random inputs and replaced.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp

import hlo_tools


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def geglu_dropout(x, w_in, w_gate, mask):
    return jax.nn.gelu(x @ w_gate) * (x @ w_in) * mask / 0.9


@hlo_tools.pattern(
    reference=geglu_dropout,
    example=(shape(2, 4, 8), shape(8, 6), shape(8, 6), shape(2, 4, 6)),
)
def one_product_geglu(x, w_in, w_gate, mask):
    gate, value = jnp.split(x @ jnp.concatenate([w_gate, w_in], 1), 2, -1)
    return jax.nn.gelu(gate) * value * (mask / 0.9)


def gated_residual(x, y, gate):
    return x + jax.nn.sigmoid(gate) * y


@hlo_tools.pattern(
    reference=gated_residual, example=(shape(2, 4, 8), shape(2, 4, 8), shape(8))
)
def fused_gate(x, y, gate):
    return x + y / (1 + jnp.exp(-gate))


def power_norm(x, scale):
    return x / (jnp.mean(x**4, axis=-1, keepdims=True) + 1e-6) ** 0.25 * scale


@hlo_tools.pattern(reference=power_norm, example=(shape(2, 4, 8), shape(8)))
def fast_power_norm(x, scale):
    square = x * x
    mean = jnp.mean(square * square, axis=-1, keepdims=True)
    return x * (scale * (mean + 1e-6) ** -0.25)


# ---------------------------------------------- the model: nothing of the above in it


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        gate = self.param("gate", nn.initializers.ones, x.shape[-1:])
        h = x / (jnp.mean(x**4, axis=-1, keepdims=True) + 1e-6) ** 0.25 * scale
        wide = mask.shape[-1]
        gated = nn.gelu(nn.Dense(wide, use_bias=False)(h))
        h = gated * nn.Dense(wide, use_bias=False)(h) * mask / 0.9
        return x + nn.sigmoid(gate) * nn.Dense(x.shape[-1])(h)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    width = 16 if parser.parse_args().quick else 256
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (3, 5, width))
    mask = jax.random.bernoulli(keys[1], 0.9, (3, 5, 2 * width)).astype(jnp.float32)
    model = Block()
    weights = model.init(keys[2], x, mask)

    def loss(weights, x):
        return jnp.mean(jnp.square(jnp.asarray(model.apply(weights, x, mask))))

    step = hlo_tools.jit(jax.value_and_grad(loss, (0, 1)), verify=True)
    got, want = step(weights, x), jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, x)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    error = max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)
    print(f"largest difference from plain jax.jit: {error:.1e}")
    assert error < 1e-4, error
    for site in step.report().sites:
        backward = bool(site.gradient and site.gradient["bound"])
        print(f"{site.pattern}: {site.status}, backward bound: {backward}")
        if site.status != "bound":
            print(f"  {site.reason}")


if __name__ == "__main__":
    main()
