"""What a user reads is the same to the letter under `jax.jit` and `hlo_tools.jit`.

Lowered programs with all debug information, jaxprs, names and signatures, error
messages, tracebacks, log lines.
"""

import contextlib
import functools
import inspect
import logging
import pickle
import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_jits import both, mesh
from jax.sharding import NamedSharding, PartitionSpec


@pytest.fixture
def x():
    return jnp.arange(8, dtype=jnp.float32) / 8


def attention(jit):
    def attention(q, k, v):
        scores = jnp.einsum("btd,bsd->bts", q, k) / 8
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)

    return jit(attention)


PROGRAMS = {
    "call": lambda jit: jit(lambda x: jnp.sin(x) + 1),
    "nested": lambda jit: jit(lambda x: jit(jnp.sin)(jit(jnp.cos)(x))),
    "grad": lambda jit: jit(jax.grad(lambda x: jit(jnp.sin)(x).sum())),
    "vmap": lambda jit: jit(jax.vmap(jit(lambda x: x[None] * 2))),
    "partial": lambda jit: jit(functools.partial(jnp.add, 1)),
    "inline": lambda jit: jit(lambda x: jit(jnp.sin, inline=True)(x)),
    "scan": lambda jit: jit(
        lambda x: jax.lax.scan(jit(lambda c, y: (c + y, y)), 0.0, x)
    ),
    "kwargs": lambda jit: functools.partial(jit(lambda x, *, y: x + y).lower, y=1),
    "scope": lambda jit: jit(jax.named_scope("scope")(lambda x: jit(jnp.sin)(x))),
    "attention": lambda jit: lambda x: attention(jit)(*[x.reshape(1, 2, 4)] * 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_lowered_programs_are_equal_to_the_letter(name, x):
    """Names of modules and functions, arguments, results, and source locations."""

    def text(jit):
        program = PROGRAMS[name](jit)
        if isinstance(program, functools.partial):
            return program(x).as_text(debug_info=True)
        if not hasattr(program, "lower"):
            program = jax.jit(program)
        return program.lower(x).as_text(debug_info=True)

    first, second = both(text)
    assert first == second


def test_compiled_programs_are_equal_to_the_letter(x):
    first, second = both(lambda jit: jit(jnp.sin).lower(x).compile().as_text())
    assert first == second


def test_jaxprs_are_equal(x):
    def outer(jit):
        return str(jax.make_jaxpr(jit(lambda x: jit(jnp.sin)(x) + 1))(x))

    first, second = both(outer)
    assert first == second


class Callable:
    def __call__(self, x):
        return x


FUNCTIONS = {
    "function": lambda: documented,
    "lambda": lambda: lambda x, y=1: x,
    "partial": lambda: functools.partial(documented, y="b"),
    "object": Callable,
    "method": lambda: Callable().__call__,
    "builtin": lambda: abs,
    "ufunc": lambda: jnp.add,
    "jitted": lambda: jax.jit(documented),
}


def documented(x: int, *, y: str = "a") -> float:
    """A docstring."""
    return x


documented.attribute = "kept"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_descriptions_are_equal(name):
    fun = FUNCTIONS[name]()

    def describe(jit):
        f = jit(fun)
        assert f.__wrapped__ is fun
        assert type(f.__name__) is str
        names = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
        found = {n: getattr(f, n, "(none)") for n in (*names, "attribute")}
        with contextlib.suppress(ValueError):
            found["signature"] = str(inspect.signature(f))
        return {**found, "repr": repr(f), "type": type(f), "callable": callable(f)}

    first, second = both(describe)
    assert first == second


def test_pickling_is_equal():
    def attempt(jit):
        try:
            return pickle.loads(pickle.dumps(jit(documented)))(2)
        except Exception as error:
            return type(error)

    first, second = both(attempt)
    assert first == second


# ---- errors


BAD_CALLS = {
    "too few": lambda jit, x: jit(documented)(),
    "too many": lambda jit, x: jit(documented)(x, x),
    "keyword": lambda jit, x: jit(documented)(x, z=1),
    "no array": lambda jit, x: jit(documented)("text"),
    "no array in tree": lambda jit, x: jit(documented)({"a": [object]}),
    "result": lambda jit, x: jit(lambda x: "text")(x),
    "result in tree": lambda jit, x: jit(lambda x: {"a": [x, "text"]})(x),
    "bool": lambda jit, x: jit(lambda x: 1 if x else 2)(1),
    "int": lambda jit, x: jit(lambda x, name: range(name))(1, 2),
    "numpy": lambda jit, x: jit(lambda x: np.asarray(x))(x),
    "shape": lambda jit, x: jit(lambda x, y: x @ y)(x, jnp.ones((3, 3))),
    "own": lambda jit, x: jit(lambda x: {}["missing"])(x),
    "unhashable": lambda jit, x: jit(lambda x, y: x, static_argnums=1)(x, [1]),
    "static name": lambda jit, x: jit(lambda x: x, static_argnames="y"),
    "static number": lambda jit, x: jit(lambda x: x, static_argnums=3),
    "donated and static": lambda jit, x: jit(
        documented, static_argnums=0, donate_argnums=0
    ),
    "donate number": lambda jit, x: jit(lambda x: x, donate_argnums=4),
    "option": lambda jit, x: jit(documented, static_argnum=0),
    "option of decorator": lambda jit, x: jit(static_argnum=0),
    "number": lambda jit, x: jit(3),
    "none": lambda jit, x: jit(None),
    "text": lambda jit, x: jit("f", static_argnums=0),
    "static method": lambda jit, x: jit(staticmethod(documented)),
    "generator": lambda jit, x: jit(generator),
    "keyword fun": lambda jit, x: jit(fun=documented),
    "sharding": lambda jit, x: jit(
        lambda x: x, in_shardings=NamedSharding(mesh(), PartitionSpec("i"))
    )(x[:3]),
    "sharding tree": lambda jit, x: jit(lambda x: x, in_shardings=(None, None))(x),
    "compiler option": lambda jit, x: jit(lambda x: x, compiler_options={"no_such": 1})(
        x
    ),
    "scan carry": lambda jit, x: jax.lax.scan(jit(lambda c, y: (c.sum(), y)), x, x),
    "grad of vector": lambda jit, x: jax.grad(jit(lambda x: x * 2))(x),
    "out of shape": lambda jit, x: jit(lambda x: x.reshape(3))(x),
    "axis name": lambda jit, x: jit(lambda x: jax.lax.psum(x, "nowhere"))(x),
    "nan": lambda jit, x: with_nan_checks(jit, x),
    "lower": lambda jit, x: jit(documented).lower("text"),
    "no weak reference": lambda jit, x: jit(Slots())(x),
    "unhashable callable": lambda jit, x: jit(Unhashable())(x),
}


def generator(x):
    yield x


class Slots:
    __slots__ = ()

    def __call__(self, x):
        return x


class Unhashable:
    __hash__: Any = None

    def __call__(self, x):
        return x


def with_nan_checks(jit, x):
    with jax.debug_nans(True):
        jit(lambda x: jnp.log(x - 2))(x)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_are_equal(name, x):
    def attempt(jit):
        with pytest.raises(Exception) as error:  # noqa: PT011
            BAD_CALLS[name](jit, x)
        text = re.sub(r"0x[0-9a-f]+|id=\d+", "#", str(error.value))
        return type(error.value), text

    first, second = both(attempt)
    assert first == second


def test_tracebacks_show_the_user_s_frames_only(x):
    def frames(jit):
        with pytest.raises(KeyError) as error:
            jit(lambda x: jax.vmap(jit(lambda x: {}["missing"]))(x))(x)
        found = traceback.extract_tb(error.value.__traceback__)
        return [(f.filename, f.name, f.lineno) for f in found]

    first, second = both(frames)
    assert first == second


def test_log_lines_are_equal(caplog, x):
    def lines(jit):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            jit(lambda x: jit(jnp.sin)(x) + 1)(x)
        return [
            re.sub(r"[\d.e-]+ sec", "# sec", r.getMessage()) for r in caplog.records
        ]

    first, second = both(lines)
    assert first
    assert first == second
