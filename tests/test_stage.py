"""Where the stage fires, where it must not, what it reports, and how it fails."""

import concurrent.futures
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sine_to_cosine
from jax.experimental import checkify, topologies
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hlo_tools
from hlo_tools import _jax, driver, stage, stage_compile
from hlo_tools.errors import HloToolsError, PassSpecError, UnknownNameError
from hlo_tools.report import RewriteReport

TESTS = Path(__file__).parent
staged = functools.partial(hlo_tools.jit, passes="")


@pytest.fixture(autouse=True)
def clean_stage(monkeypatch):
    """The visible transform, and nothing of one test in the next."""
    sine_to_cosine.inject(monkeypatch)
    stage_compile._warned.clear()
    jax.clear_caches()
    yield
    hlo_tools.uninstall()
    jax.clear_caches()


@pytest.fixture
def x():
    return jnp.linspace(0.1, 1.0, 8)


def assert_cosine(got, x):
    np.testing.assert_allclose(got, jnp.cos(x), rtol=1e-6)


def assert_sine(got, x):
    np.testing.assert_allclose(got, jnp.sin(x), rtol=1e-6)


def sine():
    """A new function every time, so that no test finds another's traces."""

    def sine(x):
        return jnp.sin(x)

    return sine


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


# ---- install, uninstall, HLO_TOOLS


def test_install_treats_every_jit(x):
    with hlo_tools.install(passes="") as installed:
        assert_cosine(jax.jit(sine())(x), jnp.asarray(x))
        assert any(r.module == "jit_sine" for r in installed.reports())
    assert_sine(jax.jit(sine())(x), x)


def test_install_is_idempotent_and_uninstall_ends_all(x):
    first = hlo_tools.install(passes="")
    second = hlo_tools.install(passes="", exactness="bitwise")
    assert_cosine(jax.jit(sine())(x), x)
    assert not first.reports()
    assert second.reports()
    hlo_tools.uninstall()
    hlo_tools.uninstall()
    assert_sine(jax.jit(sine())(x), x)


def test_nested_install_restores_what_was_before(monkeypatch, x):
    seen = []
    monkeypatch.setattr(driver, "transform", recording(seen))
    with hlo_tools.install(passes=""):
        with hlo_tools.install(passes="", exactness="bitwise"):
            jax.jit(sine())(x)
        jax.jit(sine())(x)
    jax.jit(sine())(x)
    assert [c.exactness for c in seen] == ["bitwise", "reassociating"]


def recording(seen, names=("jit_sine",)):
    def transform(module, target, config):
        if stage_compile.module_name(module) in names:
            seen.append(config)
        return sine_to_cosine.transform(module, target, config)

    return transform


def test_compiled_functions_keep_their_program(x):
    f = jax.jit(sine())
    assert_sine(f(x), x)
    with hlo_tools.install(passes=""):
        assert_sine(f(x), x)
        jax.clear_caches()
        assert_cosine(f(x), x)
    assert_cosine(f(x), x)
    jax.clear_caches()
    assert_sine(f(x), x)


def test_install_hands_out_reports(x):
    got = []
    with hlo_tools.install(passes="", report=got.append) as installed:
        jax.jit(sine())(x)
    assert got == installed.reports()
    assert got[-1].with_status("bound")


def test_decorated_settings_win_over_installed_ones(monkeypatch, x):
    seen = []
    monkeypatch.setattr(driver, "transform", recording(seen))
    f = staged(sine(), exactness="bitwise")
    with hlo_tools.install(passes="", verify=True) as installed:
        f(x)
        assert f.report() in installed.reports()
    assert seen == [stage.StageConfig("", "bitwise", False)]


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", "no"])
def test_environment_switches_it_off(value, monkeypatch, x):
    compiled_late = staged(sine())
    monkeypatch.setenv("HLO_TOOLS", value)
    f = hlo_tools.jit(sine(), passes="no-such-pass")
    assert_sine(f(x), x)
    assert_sine(compiled_late(x), x)
    with hlo_tools.install(passes="") as installed:
        assert_sine(jax.jit(sine())(x), x)
    assert not installed.reports()
    assert "HLO_TOOLS" in f.report().notes[0]
    assert "HLO_TOOLS" in compiled_late.report().notes[0]
    assert f.reports() == []
    monkeypatch.setenv("HLO_TOOLS", "on")
    jax.clear_caches()
    assert_cosine(compiled_late(x), x)


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


# ---- failures


def failing(module, target, config):
    raise ValueError("as told\nsecond line")


def test_a_failing_transform_leaves_the_program_as_written(monkeypatch, x):
    monkeypatch.setattr(driver, "transform", failing)
    f = staged(sine())
    with pytest.warns(RuntimeWarning, match="jit_sine.*ValueError: as told$"):
        assert_sine(f(x), x)
    assert "ValueError: as told" in f.report().notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_sine(f(x[:3]), x[:3])  # said once
    assert len(f.reports()) == 2


def refused_by_xla(module, target, config):
    copy, report = sine_to_cosine.transform(module, target, config)
    text = str(copy).replace(
        "stablehlo.cosine %arg0 :", "stablehlo.custom_call @no_such_target(%arg0) :"
    )
    text = text.replace(
        "(%arg0) : tensor<8xf32>", "(%arg0) : (tensor<8xf32>) -> tensor<8xf32>"
    )
    with module.context:
        return type(module).parse(text), report


def test_a_program_that_xla_refuses_is_compiled_as_written(monkeypatch, x):
    monkeypatch.setattr(driver, "transform", refused_by_xla)
    f = staged(sine())
    with pytest.warns(RuntimeWarning, match="XLA refused"):
        assert_sine(f(x), x)
    (site,) = f.report().sites
    assert site.status == "failed"
    assert site.implementation is None
    assert "no_such_target" in f.report().notes[0]


def test_the_user_s_compile_error_is_their_own(x):
    def f(x):
        return jax.ffi.ffi_call("no_such_target", x)(x) + jnp.sin(x)

    errors = []
    for jitted in (jax.jit(f), staged(f)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Exception, match="no_such_target") as error:
                jitted(x)
        assert error.value.__context__ is None
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


def test_a_failing_report_callback_is_a_warning(x):
    def callback(report):
        raise KeyError("as told")

    with pytest.warns(RuntimeWarning, match="KeyError"):
        with hlo_tools.install(passes="", report=callback):
            assert_cosine(jax.jit(sine())(x), x)


def test_a_transform_may_run_code_of_its_own(monkeypatch, x):
    depth = []

    def transform(module, target, config):
        depth.append(module)
        value = jax.jit(lambda x: jnp.sin(x) + 0 * jnp.cos(x))(jnp.zeros(3))
        assert not isinstance(value, jax.core.Tracer)
        np.testing.assert_array_equal(value, 0)  # it is not treated itself
        return sine_to_cosine.transform(module, target, config)

    monkeypatch.setattr(driver, "transform", transform)
    f = staged(sine())
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    ones = jnp.ones(5)

    def outer(x):
        f.lower(x).compile()
        with jax.ensure_compile_time_eval():
            f(ones)
        return f(x)

    with (
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard_host_to_device("disallow"),
        jax.checking_leaks(),
        jax.set_mesh(mesh),
    ):
        got = jax.jit(outer)(x)
    assert_cosine(got, x)
    assert len(depth) == 3
    assert not [n for r in f.reports() for n in r.notes]


def test_compiles_in_several_threads(x):
    functions = [staged(sine()) for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for out in pool.map(lambda f: f(x), functions):
            assert_cosine(out, x)
        for out in pool.map(functions[0], [x[:n] for n in range(1, 8)]):
            assert_cosine(out, x[: out.size])
    assert all(f.report().with_status("bound") for f in functions)
    assert len(functions[0].reports()) == 8


# ---- the seam


def python(code, **environment):
    """Runs code in a new process, with this folder on its path."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
        timeout=280,
    )


LACKING = {
    "compile": """
        import jax._src.compiler as c
        del c.compile_or_get_cached
        """,
    "lower": """
        import jax._src.interpreters.pxla as p
        p.lower_sharding_computation = lambda jaxpr, **kwargs: None
        """,
    "old": "jax.__version_info__ = (0, 11, 1)",
    "new": "jax.__version_info__ = (0, 13, 0)",
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", LACKING)
def test_a_jax_without_the_seam_gives_plain_jit_and_one_warning(name):
    done = python(
        "import jax\n"
        + textwrap.dedent(LACKING[name])
        + textwrap.dedent("""
        import jax, warnings, hlo_tools
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f = hlo_tools.jit(lambda x: x + 1, passes="anything")
            g = hlo_tools.jit(passes="anything", static_argnums=0)(lambda x: x)
            with hlo_tools.install() as installed:
                pass
        print(len(caught), caught[0].category.__name__, "hlo_tools.jit is plain" in
              str(caught[0].message))
        print(type(f) is type(jax.jit(lambda x: x)), f._fun.__name__)
        print("does not work with this JAX" in f.report().notes[0], installed.reports())
        """)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 RuntimeWarning True",
        "True <lambda>",
        "True []",
    ]


@pytest.mark.smoke
def test_the_seam_is_there():
    assert _jax.seam_problem() is None


def test_importing_and_decorating_touches_no_backend():
    done = python("""
        import jax, hlo_tools
        hlo_tools.jit(lambda x: x, passes="")
        with hlo_tools.install(passes=""):
            pass
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
        """)
    assert done.stdout == "False\n", done.stderr


def test_report_like_objects_are_reports(x):
    assert isinstance(staged(sine()).report(), RewriteReport)
