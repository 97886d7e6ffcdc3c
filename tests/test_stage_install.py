"""`install`, `uninstall` and HLO_TOOLS: the stage for the whole process, or none."""

import jax
import jax.numpy as jnp
import pytest
import sine_to_cosine
from sine_to_cosine import assert_cosine, assert_sine, sine, staged

import hlo_tools
from hlo_tools import driver, stage, stage_compile


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    with sine_to_cosine.clean_stage(monkeypatch):
        yield


@pytest.fixture
def x():
    return jnp.linspace(0.1, 1.0, 8)


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


def test_modules_are_shown(monkeypatch, x):
    """With the text as it was, whether or not it was changed, before the compile."""
    seen = []
    with hlo_tools.install(passes="", modules=seen.append) as installed:
        jax.jit(sine())(x)
        staged(sine())(x)
        jax.jit(lambda y: y + 1)(x)
    assert [one.rewritten for one in seen] == [True, True, False]
    assert "stablehlo.sine" in seen[0].original
    assert f"{__file__}" in seen[2].original  # with source locations
    assert [one.report for one in seen] == installed.reports()
    assert seen[0].config == stage.StageConfig("")


def test_a_failing_modules_callback_is_a_warning(x):
    def fail(module):
        raise OSError("disk full")

    with hlo_tools.install(passes="", modules=fail):
        with pytest.warns(RuntimeWarning, match=r"install\(modules=...\).*disk full"):
            assert_cosine(jax.jit(sine())(x), x)


def test_the_environment_limits_passes_and_sites(monkeypatch, x):
    seen = []
    monkeypatch.setattr(driver, "transform", recording(seen))
    monkeypatch.setenv("HLO_TOOLS_PASSES", "cse")
    monkeypatch.setenv("HLO_TOOLS_SKIP_SITES", "jit_f/attention.1+attention.0")
    monkeypatch.setenv("HLO_TOOLS_ONLY_SITES", "attention.5")
    f = staged(sine())
    f(x)
    sites = ("attention.0", "jit_f/attention.1")
    assert seen == [
        stage.StageConfig("cse", skip_sites=sites, only_sites=("attention.5",))
    ]
    assert any("the environment asks for" in note for note in f.report().notes)
