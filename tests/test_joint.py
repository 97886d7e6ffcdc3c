"""Attention bound together with its backward pass, in every way that JAX spells it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlo_tools

B, T, H, D = 2, 16, 2, 8
E = H * D
POLICIES = jax.checkpoint_policies


@pytest.fixture(autouse=True)
def bind_everything(monkeypatch):
    monkeypatch.setattr("hlo_tools.binding.FASTER", float("inf"))


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for s in shapes]


def causal(scores):
    t, s = scores.shape[-2:]
    return jnp.where(jnp.tril(jnp.ones((t, s), bool)), scores, -1e30)


def attention(q, k, v, change=causal):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(change(scores), -1), v)


def layer(x, w, core=attention):
    q, k, v = [(x @ w[i]).reshape(*x.shape[:2], H, D) for i in range(3)]
    return x + core(q, k, v).reshape(x.shape) @ w[3]


def agree(f, *inputs):
    """Runs `f` staged and plain; returns the staged one's report."""
    staged = hlo_tools.jit(f)
    want, got = jax.jit(f)(*inputs), staged(*inputs)
    for one, two in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        scale = max(float(jnp.abs(one).max()), 1e-6)
        assert float(jnp.abs(one - two).max()) <= 2e-5 * scale
    return staged.report()


def assert_pairs(report, pairs, forward=0):
    """Asserts that all sites are bound, so many of them with their gradient."""
    assert [site.status for site in report.sites] == ["bound"] * (pairs + forward), [
        site.reason for site in report.sites
    ]
    assert sum(site.gradient_bound for site in report.sites) == pairs
    assert not report.notes


def square(core):
    return lambda *inputs: (core(*inputs) ** 2).sum()


QKV = [(B, T, H, D)] * 3


def test_value_and_gradients():
    report = agree(jax.value_and_grad(square(attention), (0, 1, 2)), *arrays(*QKV))
    assert_pairs(report, 1)
    assert set(report.sites[0].gradient["wanted"]) == {"q", "k", "v"}


@pytest.mark.parametrize("places", [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0)])
@pytest.mark.parametrize("policy", [None, POLICIES.nothing_saveable])
def test_one_array_in_several_places(places, policy):
    """As shared keys and queries, or a latent that is keys and values."""

    def core(*inputs):
        return attention(*(inputs[place] for place in places))

    if policy is not None:
        core = jax.checkpoint(core, policy=policy)
    numbers = tuple(sorted(set(places)))
    report = agree(jax.grad(square(core), numbers), *arrays(*QKV[:2]))
    assert_pairs(report, 1)


@pytest.mark.parametrize("wanted", [0, 1, 2, (0, 1), (1, 2)])
def test_some_gradients(wanted):
    report = agree(jax.value_and_grad(square(attention), wanted), *arrays(*QKV))
    assert_pairs(report, 1)


def soft_capped(scores):
    return causal(20 * jnp.tanh(scores / 20))


def windowed(scores):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    return jnp.where((distance >= 0) & (distance < 5), scores, -jnp.inf)


@pytest.mark.parametrize("change", [soft_capped, windowed, jnp.sin, lambda s: s * s])
def test_score_functions(change):
    def core(q, k, v):
        return attention(q, k, v, change)

    assert_pairs(agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV)), 1)


@pytest.mark.parametrize("shape", [(H, T, T), (B, H, T, T), (1, 1, T, T), (B, 1, 1, T)])
def test_gradient_of_a_bias(shape):
    def core(q, k, v, bias):
        return attention(q, k, v, lambda s: s + bias)

    f = jax.value_and_grad(square(core), (0, 1, 2, 3))
    report = agree(f, *arrays(*QKV, shape))
    assert_pairs(report, 1)
    assert len(report.sites[0].gradient["wanted"]) == 4


def test_gradient_of_slopes_and_of_a_temperature():
    def core(q, k, v, slopes, temperature):
        distance = (jnp.arange(T)[:, None] - jnp.arange(T)).astype(q.dtype)
        alibi = slopes[:, None, None] * jnp.abs(distance)
        return attention(q, k, v, lambda s: s * temperature[:, None, None] - alibi)

    f = jax.value_and_grad(square(core), (0, 1, 2, 3, 4))
    report = agree(f, *arrays(*QKV, (H,), (H,)))
    assert_pairs(report, 1)
    assert len(report.sites[0].gradient["wanted"]) == 5


def repeated(q, k, v):
    return attention(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2))


def grouped(q, k, v):
    q = q.reshape(B, T, 2, 2, D)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / np.sqrt(D)
    probs = jax.nn.softmax(causal(scores), -1)
    return jnp.einsum("bkgts,bskd->btkgd", probs, v).reshape(B, T, 4, D)


@pytest.mark.parametrize("core", [repeated, grouped])
def test_grouped_heads(core):
    shapes = [(B, T, 4, D), (B, T, 2, D), (B, T, 2, D)]
    report = agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*shapes))
    assert_pairs(report, 1)
    assert report.sites[0].attributes["kv_heads"] == 2


def manual(q, k, v):
    """A softmax by hand whose maximum is differentiated too."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    powers = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", powers / powers.sum(-1, keepdims=True), v)


def divided_last(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    powers = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.einsum("bhqk,bkhd->bhqd", powers, v) / powers.sum(-1, keepdims=True)
    return out.transpose(0, 2, 1, 3)


def by_logsumexp(q, k, v):
    """jax.nn.logsumexp guards its maximum and looks at the sign of its sum."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    powers = jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", powers, v)


def by_log_softmax(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(jax.nn.log_softmax(scores)), v)


@pytest.mark.parametrize("core", [manual, divided_last, by_logsumexp, by_log_softmax])
def test_softmaxes_by_hand(core):
    assert_pairs(agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV)), 1)


CHECKPOINTS = {
    "none": None,
    "nothing": POLICIES.nothing_saveable,
    "everything": POLICIES.everything_saveable,
    "dots": POLICIES.dots_saveable,
    "dots without batch": POLICIES.dots_with_no_batch_dims_saveable,
    "no names": POLICIES.save_only_these_names("x"),
    "all but names": POLICIES.save_anything_except_these_names("x"),
}


@pytest.mark.parametrize("loop", ["scan", "python"])
@pytest.mark.parametrize("around", ["core", "layer"])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(
            name, marks=[] if name in ("nothing", "dots") else pytest.mark.slow
        )
        for name in CHECKPOINTS
    ],
)
def test_checkpoints_and_loops(policy, around, loop):
    core, block = attention, layer
    if policy != "none":
        options = {"policy": CHECKPOINTS[policy]}
        if around == "core":
            core = jax.checkpoint(attention, **options)
        else:
            block = jax.checkpoint(layer, static_argnums=2, **options)

    def loss(x, ws):
        if loop == "scan":
            x, _ = jax.lax.scan(lambda x, w: (block(x, w, core), None), x, ws)
        else:
            for w in ws:
                x = block(x, w, core)
        return (x**2).mean()

    report = agree(jax.value_and_grad(loss, (0, 1)), *arrays((B, T, E), (3, 4, E, E)))
    bodies = 1 if loop == "scan" else 3
    assert all(site.status == "bound" for site in report.sites)
    pairs = sum(site.gradient_bound for site in report.sites)
    assert pairs >= bodies


def text_after(f, *inputs):
    """Returns the StableHLO of a function as the stage leaves it."""
    text = jax.jit(f).lower(*inputs).as_text()
    return text, hlo_tools.rewrite_text(text)


def test_the_scores_leave_the_stacks():
    def loss(x, ws):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        return (x**2).sum()

    before, after = text_after(jax.grad(loss, (0, 1)), *arrays((B, T, E), (3, 4, E, E)))
    stack = f"tensor<3x{B}x{H}x{T}x{T}xf32>"
    assert stack in before
    assert stack not in after
    assert f"tensor<3x{B}x{H}x{T}xf32>" in after  # the statistics of the rows


def test_recomputation_is_counted():
    core = jax.checkpoint(attention)
    report = agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV))
    assert report.sites[0].recompute_avoided_flops == 2 * B * H * T * T * D


def test_nested_loops():
    def loss(x, ws):
        def outer(x, ws):
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0], None

        return (jax.lax.scan(outer, x, ws)[0] ** 2).mean()

    report = agree(jax.grad(loss, (0, 1)), *arrays((B, T, E), (2, 2, 4, E, E)))
    assert_pairs(report, 1)


def test_gradient_accumulation_and_auxiliary_results():
    def loss(w, x):
        out = layer(x, w)
        return (out**2).mean(), out.mean()

    def step(w, xs):
        def one(total, x):
            (value, aux), grad = jax.value_and_grad(loss, has_aux=True)(w, x)
            return total + grad, (value, aux)

        return jax.lax.scan(one, jnp.zeros_like(w), xs)

    assert_pairs(agree(step, *arrays((4, E, E), (3, B, T, E))), 1)


def test_vmapped():
    def one(q, k, v):
        return attention(q[None], k[None], v[None])

    f = jax.vmap(jax.grad(square(one), (0, 1, 2)))
    assert_pairs(agree(f, *arrays(*QKV)), 1)


def test_a_neighbor_with_its_own_gradient():
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))

    def core(q, k, v):
        return doubled(attention(doubled(q), k, v))

    assert_pairs(agree(jax.grad(square(core), (0, 1, 2)), *arrays(*QKV)), 1)


# ------------------------------------------------------------------ near misses


def with_backward(change):
    """An attention whose softmax has a backward pass of the user's own."""

    @jax.custom_vjp
    def softmax(x):
        return jax.nn.softmax(x, -1)

    def forward(x):
        p = jax.nn.softmax(x, -1)
        return p, p

    softmax.defvjp(forward, lambda p, g: (change(p, g),))

    def core(q, k, v):
        scores = causal(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)

    return core


def exact(p, g):
    return p * g - p * (p * g).sum(-1, keepdims=True)


OTHER_BACKWARDS = {
    "no row sum": lambda p, g: p * g,
    "twice the row sum": lambda p, g: p * g - 2 * p * (p * g).sum(-1, keepdims=True),
    "sum over queries": lambda p, g: p * g - p * (p * g).sum(-2, keepdims=True),
    "clipped": lambda p, g: jnp.clip(exact(p, g), -0.1, 0.1),
    "squared": lambda p, g: exact(p * p, g),
}


@pytest.mark.parametrize("name", OTHER_BACKWARDS)
def test_another_backward_pass_is_left_alone(name):
    core = with_backward(OTHER_BACKWARDS[name])
    report = agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV))
    (site,) = report.sites
    assert site.status == "inlined"
    assert "is not proven: stablehlo." in site.reason
    assert "not the gradient of the softmax" in site.reason
    assert "test_joint.py:" in site.reason


def test_a_backward_pass_without_probabilities():
    """The forward pass is all that is attention, and all that needs them."""
    core = with_backward(lambda p, g: g)
    report = agree(jax.value_and_grad(square(core), (0, 1)), *arrays(*QKV))
    assert_pairs(report, 0, forward=1)


def test_the_same_backward_pass_by_hand():
    core = with_backward(exact)
    assert_pairs(agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV)), 1)


def test_a_multiple_of_the_gradient_is_one():
    """Half the gradient, by a product after it: bound, and half."""
    core = with_backward(lambda p, g: 0.5 * exact(p, g))
    assert_pairs(agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV)), 1)


def test_probabilities_that_are_returned_too():
    def loss(q, k, v):
        scores = causal(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        probs = jax.nn.softmax(scores, -1)
        return (jnp.einsum("bhqk,bkhd->bqhd", probs, v) ** 2).sum(), probs

    report = agree(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), *arrays(*QKV))
    (site,) = report.sites
    assert site.status == "inlined"
    assert "computed anyway" in site.reason
    assert "the program's result" in site.reason


def test_second_derivatives_are_left_alone():
    grad = jax.grad(square(attention), (0,))
    f = jax.grad(lambda *a: (grad(*a)[0] ** 2).sum(), (0, 1))
    report = agree(f, *arrays(*QKV))
    assert all(site.status != "bound" for site in report.sites)


@pytest.mark.parametrize("form", ["where", "add"])
def test_rows_without_keys(form):
    """A select stops the gradient of such a row; an added mask lets it through."""
    rng = np.random.default_rng(1)
    valid = jnp.asarray(rng.random((B, T)) < 0.6).at[0].set(False)

    def change(scores):
        mask = valid[:, None, None, :]
        if form == "where":
            return jnp.where(mask, scores, -1e30)
        return scores + jnp.where(mask, 0.0, -1e30)

    def core(q, k, v):
        return attention(q, k, v, change)

    assert_pairs(agree(jax.value_and_grad(square(core), (0, 1, 2)), *arrays(*QKV)), 1)
