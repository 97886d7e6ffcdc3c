"""What happens when something goes wrong in the stage, or JAX is not as known."""

import concurrent.futures
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sine_to_cosine
from sine_to_cosine import assert_cosine, assert_sine, sine, staged

import hlo_tools
from hlo_tools import _jax, driver
from hlo_tools.report import RewriteReport

pytestmark = pytest.mark.smoke
TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    with sine_to_cosine.clean_stage(monkeypatch):
        yield


@pytest.fixture
def x():
    return jnp.linspace(0.1, 1.0, 8)


# ---- failures


def failing(module, target, config):
    raise ValueError("as told\nsecond line")


def test_a_failing_transform_leaves_the_program_as_written(monkeypatch, x):
    monkeypatch.setattr(driver, "transform", failing)
    f = staged(sine())
    with pytest.warns(
        RuntimeWarning, match="jit_sine.*ValueError: as told second line$"
    ):
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
