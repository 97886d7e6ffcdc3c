"""`hlo_tools.jit` is `jax.jit`: JAX's own behaviors of jit, asked of both.

Here: arguments, devices, effects and what can be called. Files beside this one have
compiles, transformations, and texts (names, errors, log lines).
"""

import dataclasses
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_jits import JITS, counted, mesh
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

pytestmark = pytest.mark.smoke
P = PartitionSpec


@pytest.fixture(params=JITS)
def jit(request):
    return JITS[request.param]


@pytest.fixture
def x():
    return jnp.arange(8, dtype=jnp.float32) / 8


# ---- arguments


def test_static_arguments(jit):
    @functools.partial(jit, static_argnums=1, static_argnames=("flag",))
    @counted
    def f(x, power, *, flag=False):
        assert isinstance(power, int)
        return -(x**power) if flag else x**power

    assert f(2.0, 3) == 8
    assert f(3.0, 3) == 27
    assert f(2.0, 2, flag=True) == -4
    assert f.__wrapped__.traces == 2


def test_static_argnames_follow_the_signature(jit):
    def f(x, n):
        return x * n if isinstance(n, int) else 0

    assert jit(f, static_argnames="n")(2.0, 3) == 6
    assert jit(f, static_argnums=1)(2.0, n=3) == 6


def test_static_self(jit):
    @dataclasses.dataclass(frozen=True)
    class Model:
        scale: float

        @functools.partial(jit, static_argnums=0)
        def __call__(self, x):
            return x * self.scale

        @functools.partial(jit, static_argnames="self")
        def apply(self, x):
            return x + self.scale

    assert Model(2.0)(3.0) == 6
    assert Model(2.0).apply(3.0) == 5
    assert Model(4.0).apply(3.0) == 7


def test_defaults_keywords_and_varargs(jit):
    @jit
    def f(a, b=2.0, *rest, c=3.0, **more):
        return a + b * 10 + sum(rest) * 100 + c * 1000 + sum(more.values()) * 10000

    assert f(1.0) == 3021
    assert f(1.0, c=1.0) == 1021
    assert f(1.0, 1.0, 1.0, 1.0, c=0.0, d=1.0) == 10211
    assert f(b=1.0, a=0.0) == 3010


@pytest.mark.parametrize("use_names", [False, True])
def test_donation(jit, use_names, x):
    kwargs = {"donate_argnames": "x"} if use_names else {"donate_argnums": 0}
    f = jit(lambda x, y: x + y, **kwargs)
    x, y = x + 0, x + 1
    pointer = x.unsafe_buffer_pointer()
    out = f(x, y)
    assert x.is_deleted()
    assert not y.is_deleted()
    assert out.unsafe_buffer_pointer() == pointer
    with pytest.raises(RuntimeError, match="deleted"):
        f(x, y)
    y = out + 0
    f.lower(out, y).compile()(out, y)
    assert out.is_deleted()


def test_unusable_donation_warns(jit, x):
    f = jit(lambda x: x.sum(), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        f(x + 0)


def test_keep_unused(jit, x):
    def f(x, y):
        return x

    assert "%arg1" not in jit(f).lower(x, x).as_text()
    assert "%arg1" in jit(f, keep_unused=True).lower(x, x).as_text()


@dataclasses.dataclass
class Pair:
    left: object
    right: object


jax.tree_util.register_dataclass(Pair)


def test_pytrees(jit, x):
    @jit
    def f(tree):
        pair, items, none = tree["pair"], tree["items"], tree["none"]
        assert none is None
        return Pair(pair.right, pair.left), [None, *items], {"b": (), "a": pair.left}

    pair, items, rest = f({"pair": Pair(x, 1), "items": (2.0, True), "none": None})
    np.testing.assert_array_equal(pair.right, x)
    assert items[0] is None
    assert items[1] == 2
    assert items[2].dtype == bool
    assert set(rest) == {"a", "b"}


def test_no_arguments_and_no_results(jit):
    assert jit(lambda: 3.0)() == 3
    assert jit(lambda: None)() is None
    assert jit(lambda x: ())(1) == ()


def test_results_that_are_arguments(jit, x):
    same, twice, other = jit(lambda x, y: (x, x, y))(x, 2)
    assert same is not x
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(twice, x)
    assert other == 2


def test_weak_types(jit):
    f = jit(counted(lambda x: x * 2))
    assert f(1).weak_type
    assert not f(jnp.int32(1)).weak_type
    assert f.__wrapped__.traces == 2
    assert (f(1) + jnp.float16(1)).dtype == jnp.float16


def test_numpy_and_python_scalars(jit):
    f = jit(lambda x: x)
    for value in (1, 1.5, True, 1j, np.float16(2), np.arange(3, dtype=np.int8)):
        assert f(value).dtype == jnp.asarray(value).dtype


# ---- devices


def test_shardings(jit, x):
    rows = NamedSharding(mesh(), P("i"))
    everywhere = NamedSharding(mesh(), P())
    f = jit(
        lambda x, y: (x + y, x.sum()),
        in_shardings=(rows, everywhere),
        out_shardings=(rows, None),
    )
    out, total = f(x, x)
    assert out.sharding == rows
    assert total == x.sum()
    constrained = jit(lambda x: jax.lax.with_sharding_constraint(x * 2, rows))
    assert constrained(x).sharding == rows
    placed = jax.device_put(x, rows)
    assert jit(lambda x: x + 1)(placed).sharding.is_equivalent_to(rows, 1)
    with pytest.raises(ValueError, match="kwargs"):
        f(x, y=x)


def test_committed_devices(jit, x):
    on_two = jax.device_put(x, jax.devices()[2])
    f = jit(lambda x, y: x + y)
    assert f(on_two, x).devices() == {jax.devices()[2]}
    with pytest.raises(ValueError, match="incompatible devices"):
        f(on_two, jax.device_put(x, jax.devices()[1]))
    single = jit(lambda x: x, in_shardings=SingleDeviceSharding(jax.devices()[3]))
    assert single(x).devices() == {jax.devices()[3]}


def test_explicit_mesh(jit, x):
    with jax.set_mesh(mesh(axis_types=(AxisType.Explicit,))):
        placed = jax.device_put(x, P("i"))
        assert jit(lambda x: x * 2)(placed).sharding.spec == P("i")
        spec = []
        jit(lambda x: spec.append(jax.typeof(x).sharding.spec) or x)(placed)
        assert spec == [P("i")]
        assert jit(lambda x: x, out_shardings=P())(placed).sharding.spec == P()


# ---- effects, callbacks, randomness


def test_debug_print(jit, x, capfd):
    f = jit(lambda x: jax.debug.print("x {}", x, ordered=True) or x)
    for i in range(3):
        f(i)
    jax.effects_barrier()
    assert capfd.readouterr().out == "x 0\nx 1\nx 2\n"


def test_callbacks(jit, x):
    seen = []

    @jit
    def f(x):
        jax.debug.callback(lambda x: seen.append(("debug", int(x))), x)
        io_callback(lambda x: seen.append(("first", int(x))), None, x, ordered=True)
        io_callback(lambda x: seen.append(("second", int(x))), None, x, ordered=True)
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(lambda x: np.int32(x + 1), shape, x)

    assert f(jnp.int32(1)) == 2
    assert f(jnp.int32(5)) == 6
    jax.effects_barrier()
    order = [entry for entry in seen if entry[0] != "debug"]
    assert order == [("first", 1), ("second", 1), ("first", 5), ("second", 5)]
    assert seen.count(("debug", 5)) == 1


def test_errors_in_callbacks(jit):
    def fail(x):
        raise KeyError("as told")

    f = jit(lambda x: jax.pure_callback(fail, x, x))
    with pytest.raises(Exception, match="as told"):
        f(jnp.float32(1)).block_until_ready()


def test_random_numbers(jit):
    key = jax.random.key(7)

    def f(key, shape):
        first, second = jax.random.split(key)
        return (
            jax.random.normal(first, shape),
            jax.random.bernoulli(second, 0.5, shape),
            second,
        )

    plain, jitted = f(key, (4,)), jit(f, static_argnums=1)(key, (4,))
    for a, b in zip(plain[:2], jitted[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert jitted[2] == plain[2]


# ---- what can be called, and how it is described


def test_methods_and_descriptors(jit):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @jit
        def of_class(scale: Any, x):
            return scale * x

        @staticmethod
        @jit
        def static(x):
            return x + 1

        @classmethod
        @functools.partial(jit, static_argnums=0)
        def of(cls, x):
            return x + 2

        def method(self, x):
            return self.scale * x

    model = Model(3.0)
    assert Model.of_class(2.0, 3.0) == 6
    assert model.static(1.0) == 2
    assert Model.of(1.0) == 3
    assert jit(model.method)(2.0) == 6
    with pytest.raises(TypeError, match="Model"):
        model.of_class(2.0)


def test_callables_of_all_kinds(jit, x):
    class Scale:
        def __call__(self, x):
            return 2 * x

    assert jit(Scale())(3.0) == 6
    assert jit(functools.partial(jnp.add, 1))(2) == 3
    assert jit(functools.partial(lambda a, b: a - b, b=1))(2) == 1
    assert jit(abs)(-2.0) == 2
    np.testing.assert_array_equal(jit(jnp.add)(x, x), 2 * x)
    assert jit(dict)(a=1)["a"] == 1
    assert jit(lambda x: x)(3) == 3
    assert "Scale" not in jit(Scale()).__name__


def test_attributes_can_be_set(jit):
    f = jit(lambda x: x)
    f.mine = 1
    assert f.mine == 1
    assert weakref.ref(f)() is f
    assert {f: 1}[f] == 1
