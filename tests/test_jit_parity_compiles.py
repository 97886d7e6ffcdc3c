"""When and what `hlo_tools.jit` traces and compiles: as `jax.jit` does.

Caches and their keys, warm calls, ahead-of-time use, JAX's modes.
"""

import dataclasses
import gc
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_jits import JITS, counted


@pytest.fixture(params=JITS)
def jit(request):
    return JITS[request.param]


@pytest.fixture
def x():
    return jnp.arange(8, dtype=jnp.float32) / 8


# ---- compilation and caches


def test_warm_calls_trace_and_compile_nothing(jit, x):
    events = []

    def listen(event, duration_secs, **kwargs):
        events.append(event)

    f = jit(counted(lambda x: x + 1))
    f(x)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        f(x)
        assert not [e for e in events if "/jax/core/compile" in e]
        f(x[:4])
        compiles = [e for e in events if "backend_compile" in e]
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(compiles) <= 2  # the slice, and f
    assert f.__wrapped__.traces == 2
    assert f._cache_size() == 2


def python_calls(call):
    """How many Python functions run during `call()`."""
    seen = []
    sys.setprofile(lambda frame, event, _: event == "call" and seen.append(frame))
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen) - 1  # `call` itself


def test_warm_calls_stay_in_cpp(jit, x):
    f = jit(lambda x, y: {"out": x + y["in"]})
    y = {"in": x}
    f(x, y)
    f(x, y)
    assert python_calls(lambda: f(x, y)) == 0
    compiled = f.lower(x, y).compile()
    compiled(x, y)
    compiled(x, y)
    of_jax = jax.jit(f.__wrapped__).lower(x, y).compile()
    of_jax(x, y)
    assert python_calls(lambda: compiled(x, y)) == python_calls(lambda: of_jax(x, y))


def test_a_loop_over_jit_traces_once(jit, x):
    f = counted(lambda x: x + 1)
    for _ in range(3):
        jit(f)(x)
    assert f.traces == 1
    jit(f, static_argnums=())(x)
    assert f.traces == 1
    jit(f, keep_unused=True)(x)
    assert f.traces <= 2


def test_equal_callables_share_a_trace(jit, x):
    traces = []

    @dataclasses.dataclass(frozen=True)
    class Scale:
        by: float

        def __call__(self, x):
            traces.append(self.by)
            return x * self.by

        def method(self, x):
            traces.append(self.by)
            return x * self.by

    one, two = Scale(2.0), Scale(2.0)
    jitted = jit(one), jit(two), jit(Scale(3.0))
    assert [f(1.0) for f in jitted] == [2, 2, 3]
    assert traces == [2.0, 3.0]
    methods = jit(one.method), jit(one.method)
    assert [f(1.0) for f in methods] == [2, 2]
    assert len(traces) == 3


def test_clear_caches(jit, x):
    f = jit(counted(lambda x: x + 1))
    f(x)
    f.clear_cache()
    assert f._cache_size() == 0
    f(x)
    assert f.__wrapped__.traces == 2
    jax.clear_caches()
    f(x)
    assert f.__wrapped__.traces == 3


def test_settings_in_the_key(jit, x):
    f = jit(counted(lambda a: a @ a))
    a = jnp.ones((4, 4))
    f(a)
    with jax.default_matmul_precision("highest"):
        f(a)
    with jax.enable_x64(True):
        assert jit(lambda x: x * 2)(np.float64(1)).dtype == jnp.float64
    assert f.__wrapped__.traces == 2


def test_functions_are_not_kept_alive(jit, x):
    def f(x):
        return x + 1

    alive = weakref.ref(f)
    jitted = jit(f)
    jitted(x)
    del f
    gc.collect()
    np.testing.assert_array_equal(jitted(x[:2]), x[:2] + 1)
    del jitted
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_threads(jit, x):
    f = jit(lambda x: (x * x).sum())
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(f, [x[: n % 8 + 1] for n in range(64)]))
    for n, value in enumerate(got):
        np.testing.assert_allclose(value, jnp.square(x[: n % 8 + 1]).sum(), rtol=1e-6)


# ---- ahead of time


def test_ahead_of_time(jit, x):
    f = jit(lambda x, *, y: {"out": x @ y})
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert f.eval_shape(shape, y=shape) == {"out": shape}
    assert jax.eval_shape(f, shape, y=shape) == {"out": shape}
    traced = f.trace(shape, y=shape)
    assert traced.out_info["out"].shape == (8, 8)
    lowered = traced.lower()
    assert lowered.as_text() == f.lower(shape, y=shape).as_text()
    assert "HloModule" in lowered.as_text(dialect="hlo")
    assert lowered.cost_analysis()["flops"] == 2 * 8**3
    compiled = lowered.compile(compiler_options={"xla_embed_ir_in_executable": True})
    assert "dot" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().output_size_in_bytes == 4 * 64
    eye = jnp.eye(8)
    np.testing.assert_array_equal(compiled(eye, y=eye)["out"], eye)
    with pytest.raises(TypeError, match="float32"):
        compiled(eye.astype(jnp.int32), y=eye)
    assert compiled.out_tree == jax.tree.structure({"out": 0})
    tpu = f.trace(shape, y=shape).lower(lowering_platforms=("tpu",))
    assert "dot_general" in tpu.as_text()


def test_export(jit, x):
    exported = jax.export.export(jit(jnp.sin), platforms=("cpu", "tpu"))(x)
    np.testing.assert_allclose(exported.call(x), jnp.sin(x), rtol=1e-6)
    assert exported.fun_name == "sin"
    (n,) = jax.export.symbolic_shape("n")
    symbolic = jax.export.export(jit(jnp.sin))(jax.ShapeDtypeStruct((n,), x.dtype))
    np.testing.assert_allclose(symbolic.call(x[:3]), jnp.sin(x[:3]), rtol=1e-6)


# ---- modes


def test_disable_jit(jit, x):
    kinds = []
    f = jit(lambda x: kinds.append(isinstance(x, jax.core.Tracer)) or x + 1)
    f(x)
    with jax.disable_jit():
        np.testing.assert_array_equal(f(x), x + 1)
        jax.grad(lambda x: f(x).sum())(x)
    assert kinds[:2] == [True, False]


def test_compile_time_evaluation(jit, x):
    f = jit(lambda x: x + 1)

    @jit
    def outer(x):
        with jax.ensure_compile_time_eval():
            assert int(f(2)) == 3
        return f(x)

    np.testing.assert_array_equal(outer(x), x + 1)


def test_closures_over_arrays_and_tracers(jit, x):
    big = jnp.ones((64, 64))
    np.testing.assert_array_equal(jit(lambda x: big[0, :8] + x)(x), x + 1)

    @jit
    def outer(x):
        return jit(lambda y: x * y)(x)

    np.testing.assert_array_equal(outer(x), x * x)
    np.testing.assert_array_equal(jax.grad(lambda x: outer(x).sum())(x), 2 * x)


@pytest.mark.parametrize(
    "inline", [True, jax.Inline.AUTO] if hasattr(jax, "Inline") else [True]
)
def test_inline(jit, inline, x):
    f = jit(lambda x: x + 1, inline=inline)
    np.testing.assert_array_equal(jit(lambda x: f(x) * 2)(x), (x + 1) * 2)


def test_warnings_of_the_function_point_at_the_caller(jit, x):
    def f(x):
        warnings.warn("as told", stacklevel=1)
        return x

    with pytest.warns(UserWarning, match="as told") as caught:
        jit(f)(x)
    assert caught[0].filename == __file__


def test_leaked_tracers(jit, x):
    leaked = []
    jit(leaked.append)(x)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        leaked[0] + 1
    with jax.checking_leaks():
        np.testing.assert_array_equal(jit(lambda x: x + 1)(x), x + 1)
        np.testing.assert_array_equal(
            jit(lambda x: jax.vmap(jit(jnp.negative))(x))(x), -x
        )
        with pytest.raises(Exception, match="Leaked"):
            jit(lambda x: leaked.append(x) or x)(x)


def test_deprecated_arguments_warn(jit, x):
    with pytest.warns(DeprecationWarning, match="backend and device"):
        f = jit(lambda x: x, backend="cpu")
    f(x)
