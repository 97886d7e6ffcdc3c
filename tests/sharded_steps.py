"""Training steps of small language models, for the tests under meshes of devices.

The attention is written by hand; a variant is a set of keywords of `LanguageModel`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, FEATURES = 64, 64


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A causal language model of two layers.

    Attributes:
      heads, kv_heads, head_dim: of its attention.
      length: T.
      batch: B.
      bias: "" for none, "slopes" for learned slopes of distances, "table" for an
        array [H,T,T] shared by the layers.
      padding: whether a mask [B,T] hides keys.
      scan: whether the layers are one loop.
      remat: whether each layer is computed anew in the backward pass.
      flat: whether projections are [features, H * D], as in most models.
      dtype: of the activations.
      constrain: whether activations are kept split along the batch, as most sharded
        programs do.
    """

    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 8
    length: int = 32
    batch: int = 8
    bias: str = ""
    padding: bool = False
    scan: bool = False
    remat: bool = False
    flat: bool = False
    dtype: str = "float32"
    constrain: bool = True

    def shapes(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Returns shape and sharding of each layer's parameters."""
        h, k, d = self.heads, self.kv_heads, self.head_dim
        rows: dict[str, tuple[tuple[int, ...], P]] = {
            "q": ((FEATURES, h, d), P("fsdp", "tensor")),
            "k": ((FEATURES, k, d), P("fsdp", "tensor")),
            "v": ((FEATURES, k, d), P("fsdp", "tensor")),
            "o": ((h, d, FEATURES), P("tensor", None, "fsdp")),
            "up": ((FEATURES, 4 * FEATURES), P("fsdp", "tensor")),
            "down": ((4 * FEATURES, FEATURES), P("tensor", "fsdp")),
            "norm": ((FEATURES,), P()),
        }
        if self.flat:
            for name in "qkv":
                heads = h if name == "q" else k
                rows[name] = ((FEATURES, heads * d), P("fsdp", "tensor"))
            rows["o"] = ((h * d, FEATURES), P("tensor", "fsdp"))
        if self.bias == "slopes":
            rows["slopes"] = ((h,), P("tensor"))
        return rows

    def parameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns random parameters, and their shardings over all three axes."""
        rng = np.random.default_rng(0)

        def make(shape, stacked=()):
            array = rng.standard_normal((*stacked, *shape)) / np.sqrt(FEATURES)
            return array.astype(np.float32)

        rows = self.shapes()
        shared: dict[str, tuple[tuple[int, ...], P]]
        shared = {"embed": ((VOCABULARY, FEATURES), P(None, "fsdp"))}
        if self.bias == "table":
            table = (self.heads, self.length, self.length)
            shared["table"] = (table, P("tensor"))
        arrays: dict[str, Any] = {n: make(shape) for n, (shape, _) in shared.items()}
        specs: dict[str, Any] = {n: spec for n, (_, spec) in shared.items()}
        if self.scan:
            arrays["layers"] = {n: make(s, (2,)) for n, (s, _) in rows.items()}
            specs["layers"] = {n: P(None, *spec) for n, (_, spec) in rows.items()}
        else:
            arrays["layers"] = [{n: make(s) for n, (s, _) in rows.items()}] * 2
            specs["layers"] = [{n: spec for n, (_, spec) in rows.items()}] * 2
        return arrays, specs

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns tokens, and their shardings."""
        rng = np.random.default_rng(1)
        shape = (self.batch, self.length)
        tokens = rng.integers(0, VOCABULARY, shape).astype(np.int32)
        arrays, specs = {"tokens": tokens}, {"tokens": P(("data", "fsdp"))}
        if self.padding:
            lengths = rng.integers(self.length // 2, self.length, (self.batch, 1))
            arrays["mask"] = np.arange(self.length) < lengths
            specs["mask"] = P(("data", "fsdp"))
        return arrays, specs

    def scores(self, q, k, params, inputs):
        t = self.length
        s = jnp.einsum("bqhe,bkhe->bhqk", q, k).astype(jnp.float32) / math.sqrt(
            self.head_dim
        )
        distance = jnp.arange(t)[None, :] - jnp.arange(t)[:, None]
        if "slopes" in params:
            slopes = params["slopes"].astype(s.dtype)[:, None, None]
            s = s + slopes * distance.astype(s.dtype)
        if "table" in params:
            s = s + params["table"].astype(s.dtype)
        visible = distance <= 0
        if self.padding:
            visible = visible & inputs["mask"][:, None, None, :]
        return jnp.where(visible, s, jnp.asarray(-1e9, s.dtype))

    def project(self, x, weight, heads):
        if not self.flat:
            return jnp.einsum("btf,fhe->bthe", x, weight.astype(x.dtype))
        flat = x @ weight.astype(x.dtype)
        return flat.reshape(*x.shape[:2], heads, self.head_dim)

    def layer(self, x, params, inputs):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        h = h * (1 + params["norm"].astype(x.dtype))
        q = self.project(h, params["q"], self.heads)
        k = self.project(h, params["k"], self.kv_heads)
        v = self.project(h, params["v"], self.kv_heads)
        group = self.heads // self.kv_heads
        if group > 1:
            k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        s = self.scores(q, k, params, inputs)
        o = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(s).astype(x.dtype), v)
        wo = params["o"].astype(x.dtype)
        if self.flat:
            x = x + o.reshape(*x.shape[:2], -1) @ wo
        else:
            x = x + jnp.einsum("bthe,hef->btf", o, wo)
        up = jax.nn.gelu(x @ params["up"].astype(x.dtype))
        return self.kept(x + up @ params["down"].astype(x.dtype))

    def kept(self, x):
        mesh = jax.sharding.get_abstract_mesh()
        if not self.constrain or mesh.empty:
            return x
        axes = tuple(n for n in ("data", "fsdp") if n in mesh.axis_names)
        return jax.lax.with_sharding_constraint(x, P(axes or None))

    def loss(self, params, inputs):
        x = params["embed"][inputs["tokens"]].astype(self.dtype)
        x = self.kept(x)
        layer = functools.partial(self.layer, inputs=inputs)
        layer = jax.checkpoint(layer) if self.remat else layer
        shared = {n: params[n] for n in ("table",) if n in params}
        if self.scan:
            x, _ = jax.lax.scan(
                lambda x, p: (layer(x, {**p, **shared}), None), x, params["layers"]
            )
        else:
            for own in params["layers"]:
                x = layer(x, {**own, **shared})
        logits = (x @ params["embed"].astype(x.dtype).T).astype(jnp.float32)
        found = jax.nn.log_softmax(logits[:, :-1])
        target = inputs["tokens"][:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(found, target, -1))

    def step(self, params, inputs):
        """Returns (loss, parameters after a step of gradient descent)."""
        loss, gradients = jax.value_and_grad(self.loss)(params, inputs)
        return loss, jax.tree.map(lambda p, g: p - 10.0 * g, params, gradients)


def make_mesh(**axes: int) -> Mesh:
    """Returns a mesh of the first devices."""
    sizes, names = tuple(axes.values()), tuple(axes)
    kinds = (AxisType.Auto,) * len(names)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=devices)


def on_mesh(mesh: Mesh, specs):
    """Returns shardings; axes that the mesh lacks are left out."""

    def place(spec: P) -> NamedSharding:
        dims = []
        for names in spec:
            names = (names,) if isinstance(names, str) else names or ()
            dims.append(tuple(n for n in names if n in mesh.axis_names) or None)
        return NamedSharding(mesh, P(*dims))

    return jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))


def sharded_step(model: LanguageModel, mesh: Mesh):
    """Returns (arguments of `model.step` on a mesh, shardings of its results)."""
    params, param_specs = model.parameters()
    inputs, input_specs = model.inputs()
    shardings = on_mesh(mesh, (param_specs, input_specs))
    arguments = jax.device_put((params, inputs), shardings)
    return arguments, (NamedSharding(mesh, P()), shardings[0])
