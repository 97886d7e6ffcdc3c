"""MNIST-style training: a Flax Linen CNN with Optax, on digits drawn with NumPy.

Written as Flax's own MNIST example is: `apply_model`, `update_model`, `train_epoch`.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

# 3x5 glyphs of the ten digits, one row of three bits at a time.
GLYPHS = (
    "111101101101111 010110010010111 111001111100111 111001111001111 101101111001001 "
    "111100111001111 111100111101111 111001010010010 111101111101111 111101111001111"
).split()


class CNN(nn.Module):
    """A simple CNN model."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=8, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=16, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        x = nn.Dense(features=64)(x)
        x = nn.relu(x)
        return nn.Dense(features=10)(x)


@jax.jit
def apply_model(state, images, labels):
    """Computes gradients, loss and accuracy for a single batch."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, 10)
        loss = jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot))
        return loss, logits

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    return grads, loss, accuracy


@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)


def train_epoch(state, train_ds, batch_size, rng):
    """Trains for a single epoch."""
    steps = len(train_ds["image"]) // batch_size
    perms = jax.random.permutation(rng, len(train_ds["image"]))
    perms = perms[: steps * batch_size].reshape((steps, batch_size))
    losses, accuracies = [], []
    for perm in perms:
        images, labels = train_ds["image"][perm, ...], train_ds["label"][perm, ...]
        grads, loss, accuracy = apply_model(state, images, labels)
        state = update_model(state, grads)
        losses.append(float(loss))
        accuracies.append(float(accuracy))
    return state, np.mean(losses), np.mean(accuracies)


def draw_digits(count, rng):
    """Draws `count` noisy, shifted digits -> images [count, 28, 28, 1], labels."""
    labels = rng.integers(0, 10, count)
    images = np.zeros((count, 28, 28), np.float32)
    for image, label in zip(images, labels, strict=True):
        glyph = np.array(list(GLYPHS[label]), np.float32).reshape(5, 3)
        row, column = rng.integers(1, 8), rng.integers(1, 13)
        image[row : row + 20, column : column + 12] = np.kron(glyph, np.ones((4, 4)))
    images += rng.normal(0, 0.2, images.shape)
    return {"image": jnp.asarray(images[..., None]), "label": jnp.asarray(labels)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    data = np.random.default_rng(0)
    train_ds, test_ds = draw_digits(512, data), draw_digits(128, data)
    rng, init_rng = jax.random.split(jax.random.key(0))
    cnn = CNN()
    params = cnn.init(init_rng, jnp.ones([1, 28, 28, 1]))["params"]
    state = train_state.TrainState.create(
        apply_fn=cnn.apply, params=params, tx=optax.sgd(0.05, momentum=0.9)
    )
    for epoch in range(1, args.epochs + 1):
        rng, input_rng = jax.random.split(rng)
        state, loss, accuracy = train_epoch(state, train_ds, 32, input_rng)
        _, test_loss, test_accuracy = apply_model(
            state, test_ds["image"], test_ds["label"]
        )
        print(f"epoch {epoch} train_loss {loss!s} train_accuracy {accuracy!s}")
        print(f"epoch {epoch} test_loss {test_loss!s} test_accuracy {test_accuracy!s}")
    norm = sum(
        np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(state.params)
    )
    print(f"checksum {norm!s}")


if __name__ == "__main__":
    main()
