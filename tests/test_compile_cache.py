"""A warm persistent compilation cache serves the right program, stage or no stage.

Each step is a process of its own on one cache folder. The injected transform turns
sines into cosines, so a program served to the wrong asker gives a wrong number.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SIN, COS, NEGATED = 0.8415, 0.5403, -1.0  # sine and cosine of 1, and -1

PROGRAM = textwrap.dedent("""
    import contextlib, json, sys
    import jax, jax.numpy as jnp
    import hlo_tools, sine_to_cosine
    from hlo_tools import driver

    how = sys.argv[1]
    hits, misses = [], []

    def listen(event, **kwargs):
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)
        if event == "/jax/compilation_cache/cache_misses":
            misses.append(event)

    jax.monitoring.register_event_listener(listen)
    x = jax.device_put(1.0)

    def f(x):
        return jnp.sin(x)

    def negate(module, target, config):
        copy, report = sine_to_cosine.transform(module, target, config)
        text = str(copy).replace("stablehlo.cosine", "stablehlo.negate")
        with module.context:
            return type(module).parse(text), report

    if how != "unbound":
        sine_to_cosine.inject()
    if how == "negated":
        driver.transform = negate
    if how == "installed":
        hlo_tools.install(passes="")
    decorated = how in ("staged", "unbound", "negated", "off", "ahead of time")
    jitted = hlo_tools.jit(f, passes="") if decorated else jax.jit(f)
    if how == "ahead of time":
        jitted = jitted.lower(x).compile()
    if how == "outer":
        inner = hlo_tools.jit(f, passes="")
        jitted = jax.jit(lambda x: inner(x))
    value = round(float(jitted(x)), 4)
    print(json.dumps({"value": value, "hits": len(hits), "misses": len(misses)}))
    """)

EXPECTED = {
    "plain": SIN,
    "off": SIN,
    "unbound": SIN,
    "staged": COS,
    "installed": COS,
    "ahead of time": COS,
    "outer": COS,
    "negated": NEGATED,
}


def run(how, cache):
    """One process; what it computed, and whether the cache had the program."""
    settings = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "HLO_TOOLS": "off" if how == "off" else "",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# "+" marks what has to come out of the cache, "-" what has to be compiled.
SEQUENCES = {
    "plain first": ["-plain", "-staged", "+plain", "+staged", "+off", "+unbound"],
    "stage first": ["-staged", "-plain", "+installed", "+staged", "+ahead of time"],
    "two pipelines": ["-staged", "-negated", "+staged", "+negated"],
    "outer jit": ["-plain", "-outer", "+outer"],
    "off first": ["-off", "+plain", "-installed", "+off"],
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SEQUENCES)
def test_warm_cache(name, tmp_path):
    for step in SEQUENCES[name]:
        expected, how = step[0], step[1:]
        files = set(os.listdir(tmp_path))
        got = run(how, tmp_path)
        assert got["value"] == EXPECTED[how], f"wrong program for {how}"
        assert (got["hits"], got["misses"]) == ((1, 0) if expected == "+" else (0, 1))
        new = {file for file in os.listdir(tmp_path) if file not in files}
        new = {file for file in new if not file.endswith("-atime")}
        assert len(new) == (expected == "-"), new
