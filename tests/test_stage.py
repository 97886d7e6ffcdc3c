"""Where the stage fires, where it must not, and what it reports."""

import copy
import functools
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sine_to_cosine
from jax.experimental import checkify, topologies
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sine_to_cosine import assert_cosine, assert_sine, sine, staged

import hlo_tools
from hlo_tools import driver
from hlo_tools.errors import HloToolsError, PassSpecError, UnknownNameError

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    with sine_to_cosine.clean_stage(monkeypatch):
        yield


@pytest.fixture
def x():
    return jnp.linspace(0.1, 1.0, 8)


# ---- where it fires


def test_decorated_function_is_treated_and_no_other(x):
    f, plain = staged(sine()), jax.jit(sine())
    assert_cosine(f(x), x)
    assert_cosine(f(x), x)
    assert_sine(plain(x), x)


@pytest.mark.parametrize("arguments", [(), (staged.func,)], ids=["options", "bare"])
def test_decorator_forms(arguments, x):
    decorate = arguments[0] if arguments else hlo_tools.jit(passes="", inline=False)
    if arguments:
        decorate = functools.partial(decorate, passes="")
    assert_cosine(decorate(sine())(x), x)


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * f(x),))
    return g


def in_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * f(*primals)))
    return g


def in_shard_map(f):
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    spec = PartitionSpec("i")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


def in_pallas(f):
    def kernel(x_ref, out_ref):
        out_ref[...] = f(x_ref[...])

    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    return call


def in_custom_vmap(f):
    g = jax.custom_batching.custom_vmap(f)
    g.def_vmap(lambda size, batched, x: (f(x), True))
    return lambda x: jax.vmap(g)(x[None])[0]


def in_linear_solve(f):
    def solve(matvec, b):
        return f(b)

    return lambda x: jax.lax.custom_linear_solve(lambda v: 2 * v, x, solve)


def in_reduce(f):
    add = staged(lambda a, b: a + b)  # the decorated function is the reducer alone
    zero = np.float32(0)
    return lambda x: jax.lax.reduce(jnp.sin(x)[:, None], zero, add, dimensions=(1,))


def in_checkify(f):
    def checked(x):
        error, out = checkify.checkify(f)(x)
        del error
        return out

    return checked


# Each turns a jitted function into one of the same values: outer programs of
# which the decorated function is only a part.
CONTEXTS = {
    "call": lambda f: f,
    "twice": lambda f: lambda x: (f(x) + f(x)) / 2,
    "jit": lambda f: jax.jit(f),
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x)[1],
    "map": lambda f: lambda x: jax.lax.map(f, x),
    "fori": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda i, y: f(y), x),
    "while": lambda f: (
        lambda x: jax.lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x)
        )[1]
    ),
    "cond": lambda f: lambda x: jax.lax.cond(x[0] < 2, f, jnp.zeros_like, x),
    "switch": lambda f: lambda x: jax.lax.switch(x.size - 7, [jnp.zeros_like, f], x),
    "custom_vjp": in_custom_vjp,
    "custom_jvp": in_custom_jvp,
    "custom_vmap": in_custom_vmap,
    "linear_solve": in_linear_solve,
    "reduce": in_reduce,
    "shard_map": in_shard_map,
    "checkify": in_checkify,
    "pallas": in_pallas,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[0],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[0],
    "remat grad": lambda f: (
        lambda x: jax.value_and_grad(lambda y: jax.checkpoint(f)(y).sum())(x)[0]
    ),
    "eval_jaxpr": lambda f: lambda x: jax.make_jaxpr(f)(x) and f(x),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_outer_program_is_treated(name, x):
    f = staged(sine())
    outer = jax.jit(CONTEXTS[name](f))
    expected = jnp.cos(x).sum() if name == "remat grad" else jnp.cos(x)
    np.testing.assert_allclose(outer(x), expected, rtol=1e-6)
    if name != "reduce":
        assert f.report().with_status("bound")


@pytest.mark.parametrize("name", ["scan", "vmap", "shard_map", "cond", "custom_vjp"])
def test_outer_training_step_is_treated_as_a_whole(name, x):
    f = CONTEXTS[name](staged(lambda x: jnp.sin(x)))
    got = jax.jit(jax.grad(lambda x: f(x).sum()))(x)
    plain = CONTEXTS[name](jax.jit(lambda x: jnp.sin(x)))
    kept = jax.jit(jax.grad(lambda x: plain(x).sum()))(x)
    if name == "custom_vjp":  # the backward pass is one more sine
        assert_cosine(got, x)
        assert_sine(kept, x)
    else:  # a derivative of sine is a cosine in either program
        np.testing.assert_array_equal(got, kept)


def test_eager_transformations_are_treated(x):
    f = staged(sine())
    assert_cosine(jax.vmap(f)(x), x)
    assert_cosine(jax.vjp(f, x)[0], x)

    def square(x):
        return jnp.sin(x) ** 2  # the derivative has a sine of its own

    got = jax.grad(lambda x: staged(square)(x).sum())(x)
    np.testing.assert_allclose(got, 2 * jnp.cos(x) * jnp.cos(x), rtol=1e-5)


def test_outer_program_is_treated_outside_of_the_function_too(x):
    f = staged(lambda x: x + 0)
    assert_cosine(jax.jit(lambda x: jnp.sin(f(x)))(x), x)


def test_a_dead_call_leaves_the_program_alone(x):
    f = staged(lambda x: x + 1)

    @jax.jit
    def outer(x):
        del x["dead"]
        return jnp.sin(x["x"])

    @jax.jit
    def program(x):
        return jax.lax.cond(True, lambda x: jnp.sin(x), f, x)

    assert_sine(outer({"x": x, "dead": f(x)}), x)
    assert program(x).shape == x.shape


def test_ahead_of_time(x):
    f = staged(sine())
    lowered = f.lower(x)
    assert "stablehlo.sine" in lowered.as_text()
    assert_cosine(lowered.compile()(x), x)
    assert_cosine(f.trace(x).lower().compile()(x), x)
    assert len(f.reports()) >= 1
    assert "stablehlo.sine" in lowered.as_text()  # JAX's module is not changed


def test_several_devices(x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    f = staged(sine(), in_shardings=sharding, out_shardings=sharding)
    out = f(x)
    assert_cosine(out, x)
    assert out.sharding == sharding


def test_symbolic_shapes(x):
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(sine()))(jax.ShapeDtypeStruct((n,), x.dtype))
    f = staged(lambda x: exported.call(x))
    assert_cosine(f(x), x)


def test_export_is_plain_and_the_caller_decides(x):
    f = staged(sine())
    both = (f, jax.jit(f.__wrapped__))
    exported, plain = [jax.export.export(jitted)(x) for jitted in both]
    assert exported.mlir_module() == plain.mlir_module()
    assert not exported.unordered_effects
    assert_sine(jax.jit(exported.call)(x), x)
    assert_cosine(staged(exported.call)(x), x)


def test_an_exported_function_can_be_serialized(x):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    exported = jax.export.export(staged(sine()))(x)
    loaded = jax.export.deserialize(bytearray(exported.serialize()))
    assert_sine(jax.jit(loaded.call)(x), x)


def test_compile_only_target(monkeypatch, x):
    pytest.importorskip("libtpu", reason="compiles for TPUs; pip install libtpu")
    targets = []

    def transform(module, target, config):
        targets.append(target)
        return sine_to_cosine.transform(module, target, config)

    monkeypatch.setattr(driver, "transform", transform)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    sharding = NamedSharding(Mesh(topology.devices, ("i",)), PartitionSpec("i"))
    f = staged(sine(), in_shardings=sharding)
    text = f.trace(jax.ShapeDtypeStruct(x.shape, x.dtype)).lower().compile().as_text()
    assert "cosine" in text
    assert "sine(" not in text.replace("cosine(", "")
    assert [(t.platform, t.num_devices) for t in targets] == [("tpu", 4)]


# ---- options and reports


@pytest.mark.parametrize("apply", [hlo_tools.jit, hlo_tools.install])
def test_bad_options_raise_at_once(apply):
    with pytest.raises(UnknownNameError, match="bitwise"):
        apply(passes="", exactness="bitwize")
    with pytest.raises(HloToolsError, match="no-such-pass"):
        apply(passes="no-such-pass")
    with pytest.raises(PassSpecError):
        apply(passes="{")


def test_report_says_when_nothing_is_compiled(x):
    f = staged(sine())
    assert "not compiled" in f.report().notes[0]
    assert f.report().module == "jit_sine"
    assert f.reports() == []
    f(x)
    assert f.report() is f.reports()[-1]


def test_one_report_for_each_compile(x):
    f = staged(sine())
    f(x)
    f(x)
    assert len(f.reports()) == 1
    f(x[:4])
    assert [r.module for r in f.reports()] == ["jit_sine", "jit_sine"]


def test_the_report_of_a_method_is_its_function_s(x):
    class Model:
        @functools.partial(hlo_tools.jit, passes="", static_argnums=0)
        def apply(self, x):
            return jnp.sin(x)

    model = Model()
    assert_cosine(model.apply(x), x)
    assert model.apply.report().with_status("bound")
    assert Model.apply.report() is model.apply.report()


def test_functions_in_one_program_share_its_report(x):
    f, g = staged(sine()), staged(sine(), exactness="bitwise")
    outer = staged(lambda x: f(x) + g(x))
    outer(x)
    assert f.report() is outer.report()
    assert g.report() is outer.report()
    (note,) = outer.report().notes
    assert "bitwise" in note
    assert "<lambda>" in note


def test_equal_functions_and_options_share_traces_and_reports(x):
    traces = []

    def f(x):
        traces.append(x)
        return jnp.sin(x)

    for _ in range(3):
        assert_cosine(staged(f)(x), x)
    assert len(traces) == 1
    assert len(staged(f).reports()) == 1
    staged(f, exactness="bitwise")(x)
    assert len(traces) == 2
    jax.jit(f)(x)
    assert len(traces) == 3


def test_nothing_is_kept_alive(x):
    f = sine()
    f.payload = payload = threading.Event()
    jitted = staged(f)
    jitted(x)
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is not None
    assert_cosine(jitted(x[:3]), x[:3])
    del jitted
    jax.clear_caches()
    gc.collect()
    assert alive() is None
    assert payload is not None


def module_level_sine(x):
    return jnp.sin(x)


def test_copies_and_pickles_work_on_their_own(monkeypatch, x):
    original = staged(sine())
    copied = copy.copy(original)
    del original
    gc.collect()
    assert_cosine(copied(x), x)
    stand_in = staged(module_level_sine)._fun
    assert pickle.loads(pickle.dumps(stand_in)) is stand_in
    name = pickle.loads(pickle.dumps(stand_in.__name__))
    assert (name, name.mark.config) == ("module_level_sine", stand_in.mark.config)
    monkeypatch.setenv("HLO_TOOLS", "off")
    assert pickle.loads(pickle.dumps(stand_in)) is module_level_sine
