"""`hlo_tools.jit` composes with JAX's transformations as `jax.jit` does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_jits import JITS, mesh
from jax.experimental import checkify, jet, sparse
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

pytestmark = pytest.mark.smoke
P = PartitionSpec


@pytest.fixture(params=JITS)
def jit(request):
    return JITS[request.param]


@pytest.fixture
def x():
    return jnp.arange(8, dtype=jnp.float32) / 8


# ---- composition with transformations


def test_nested_both_ways(jit, x):
    f = jit(lambda x: jnp.sin(x) + 1)
    np.testing.assert_allclose(jax.jit(lambda x: f(x) * 2)(x), f(x) * 2)
    g = jax.jit(lambda x: jnp.sin(x) + 1)
    np.testing.assert_allclose(jit(lambda x: g(x) * 2)(x), g(x) * 2)
    np.testing.assert_allclose(jit(jit(f))(x), f(x))
    np.testing.assert_allclose(jax.jit(f)(x), f(x))
    np.testing.assert_allclose(jit(g)(x), f(x))


def test_derivatives(jit, x):
    def f(x):
        return jnp.sum(jnp.sin(x) * x**2)

    g = jit(f)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(jax.grad(g)(x), jax.grad(f)(x))
    close(jit(jax.grad(g))(x), jax.grad(f)(x))
    close(jax.value_and_grad(g)(x)[0], f(x))
    close(jax.hessian(g)(x), jax.hessian(f)(x))
    close(jax.jacfwd(jax.jacrev(g))(x), jax.hessian(f)(x))
    close(jax.jvp(g, (x,), (x,))[1], jax.jvp(f, (x,), (x,))[1])
    close(jax.linearize(g, x)[1](x), jax.jvp(f, (x,), (x,))[1])
    close(jax.vjp(g, x)[1](2.0)[0], 2 * jax.grad(f)(x))
    linear = jit(lambda x: 3 * x)
    close(jax.linear_transpose(linear, x)(x)[0], 3 * x)
    aux = jit(lambda x: (f(x), x))
    close(jax.grad(aux, has_aux=True)(x)[1], x)


def test_vmap(jit, x):
    f = jit(lambda x, y: (x * y).sum())
    table = jnp.stack([x, x + 1])
    np.testing.assert_allclose(jax.vmap(f, (0, None))(table, x), table @ x)
    np.testing.assert_allclose(
        jit(jax.vmap(jax.vmap(f, (0, None)), (None, 0)))(table, table), table @ table.T
    )
    named = jit(lambda x: jax.lax.psum(x, "batch"))
    np.testing.assert_allclose(
        jax.vmap(named, axis_name="batch")(x), jnp.full(8, x.sum())
    )


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint(jit, policy):
    a = jnp.eye(4) + 0.1

    def loss(wrap, a):
        def f(a):
            return jnp.sin(a @ a) @ a

        return jnp.sum(jax.checkpoint(wrap(f), policy=policy)(a))

    plain = jax.grad(functools.partial(loss, lambda f: f))(a)
    np.testing.assert_allclose(
        jax.grad(functools.partial(loss, jit))(a), plain, rtol=1e-5
    )
    whole = jit(jax.grad(functools.partial(loss, jit)))
    np.testing.assert_allclose(whole(a), plain, rtol=1e-5)


def test_control_flow(jit, x):
    f = jit(lambda x: x * 2)

    def program(f, x):
        x, _ = jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2, unroll=2)
        x = jax.lax.fori_loop(0, 2, lambda _, x: f(x), x)
        x = jax.lax.while_loop(lambda x: f(x)[1] < 9, f, x)
        x = jax.lax.cond(x[1] > 0, f, lambda x: x, x)
        x = jax.lax.switch(1, [lambda x: x, f], x)
        x = jax.lax.map(f, x, batch_size=4)
        return jax.lax.associative_scan(lambda a, b: f(a + b) / 2, x)

    expected = program(lambda x: x * 2, x)
    np.testing.assert_allclose(jit(functools.partial(program, f))(x), expected)
    np.testing.assert_allclose(program(f, x), expected)
    batch = jnp.stack([x, x + 1])
    inner = functools.partial(program, f)
    np.testing.assert_allclose(jit(jax.vmap(inner))(batch)[0], expected)

    def loss(f, x):
        step = jax.checkpoint(lambda c, _: (jnp.sin(f(c)), c.sum()))
        c, sums = jax.lax.scan(step, x, None, length=4)
        return c.sum() + sums.sum()

    np.testing.assert_allclose(
        jit(jax.grad(functools.partial(loss, f)))(x),
        jax.grad(functools.partial(loss, lambda x: x * 2))(x),
        rtol=1e-5,
    )


def test_custom_derivatives(jit, x):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(scale, x):
        return jit(jnp.sin)(x) * scale

    f.defvjp(lambda scale, x: (f(scale, x), x), lambda scale, x, ct: (jit(jnp.exp)(x),))

    @jax.custom_jvp
    def g(x):
        return jit(jnp.cos)(x)

    g.defjvp(lambda primals, tangents: (g(*primals), jit(jnp.negative)(*tangents)))

    def loss(x):
        return jit(functools.partial(f, 2.0))(x).sum() + jit(g)(x).sum()

    expected = jnp.exp(x) - 1  # what the rules above say
    np.testing.assert_allclose(jax.grad(loss)(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jit(jax.grad(loss))(x), expected, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(loss))(x[:, None])[:, 0], expected, rtol=1e-6
    )


def test_solvers_and_reducers(jit, x):
    f = jit(lambda v: 2 * v)
    solved = jit(
        lambda b: jax.lax.custom_linear_solve(
            f, b, lambda mv, b: jit(lambda b: b / 2)(b), lambda mv, b: b / 2
        )
    )
    np.testing.assert_allclose(solved(x), x / 2)
    np.testing.assert_allclose(jax.grad(lambda b: solved(b).sum())(x), jnp.full(8, 0.5))
    root = jit(
        lambda c: jax.lax.custom_root(
            jit(lambda y: y**2 - c),
            1.0,
            lambda _, y: jnp.sqrt(c),
            lambda g, y: y / g(1.0),
        )
    )
    np.testing.assert_allclose(jax.grad(root)(4.0), 0.25)
    reduce = jit(lambda x: jax.lax.reduce(x, 0.0, jit(lambda a, b: a + b), (0,)))
    assert reduce(x) == x.sum()
    window = jit(
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jit(jax.lax.max), (2,), (2,), "VALID"
        )
    )
    np.testing.assert_array_equal(window(x), x[1::2])


def test_other_transformations(jit, x):
    f = jit(jnp.sin)
    checked = checkify.checkify(f, checkify.nan_checks)
    assert checked(jnp.inf)[0].get() is not None
    assert checked(1.0)[0].get() is None
    asserting = jit(lambda x: checkify.check(x > 0, "negative") or x)
    assert "negative" in str(checkify.checkify(asserting)(-1.0)[0].get())
    primal, terms = jet.jet(f, (0.5,), ((1.0, 0.0),))
    np.testing.assert_allclose(
        (primal, terms[0]), (jnp.sin(0.5), jnp.cos(0.5)), rtol=1e-6
    )
    matrix = sparse.BCOO.fromdense(jnp.eye(8) * 2)
    np.testing.assert_allclose(
        sparse.sparsify(jit(lambda m, x: m @ x))(matrix, x), 2 * x
    )
    batched = jax.custom_batching.custom_vmap(f)
    batched.def_vmap(lambda size, flags, x: (f(x) * 0, True))
    np.testing.assert_array_equal(jit(jax.vmap(batched))(x), jnp.zeros(8))


def test_pallas_kernels(jit, x):
    def kernel(x_ref, out_ref):
        out_ref[...] = jit(lambda x: x * 2)(x_ref[...])

    call = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )
    np.testing.assert_array_equal(jit(call)(x), 2 * x)


def test_refs(jit, x):
    ref = jax.new_ref(x)

    @jit
    def f(ref, y):
        ref[...] += y
        inner = jax.new_ref(y)
        inner[0] = 7.0
        return inner[...]

    assert f(ref, x)[0] == 7
    f(ref, x)
    np.testing.assert_array_equal(ref[...], 3 * x)


def test_shard_map_both_ways(jit, x):
    kwargs = {"mesh": mesh(), "in_specs": P("i"), "out_specs": P("i")}

    def body(x):
        return jit(lambda x: x - jax.lax.pmean(x, "i"))(x)

    mapped = jax.shard_map(body, **kwargs)
    expected = x - x.reshape(4, 2).mean(0)[jnp.arange(8) % 2]
    np.testing.assert_allclose(jit(mapped)(x), expected, atol=1e-6)
    np.testing.assert_allclose(mapped(x), expected, atol=1e-6)
    loss = jit(lambda x: (mapped(x) ** 2).sum())
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * expected, atol=1e-6)
    np.testing.assert_allclose(jax.pmap(jit(lambda x: x * 2))(x), 2 * x)
