"""The arrays that a case's program takes, and which of them it differentiates."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from fuzz_case import Case

MODEL = 4  # width of x in the fused and projected sources
STACK = 2  # examples that the vmap modes map over
DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": jnp.bfloat16,
    "float16": np.float16,
}
# How the side inputs of a mask are labelled.
DENSE_LABELS = {
    "dense": "ts", "dense_full": "bhts", "dense_heads": "hts", "sparse_rows": "ts",
}  # fmt: skip
INPUT_BIASES = ("ts", "hts", "bhts", "bts", "hs", "s")


def sizes_of(case: Case) -> dict[str, int]:
    """Returns the extent of every label."""
    return {
        "a": 2, "b": case.batch, "h": case.heads, "n": case.kv_heads, "g": case.group,
        "t": case.q_len, "s": case.keys, "d": case.head_dim, "e": case.values,
        "z": 0, "m": MODEL, "x": case.heads,
    }  # fmt: skip


def query_labels(case: Case) -> str:
    """Returns the labels of q in the case's layout."""
    names = {"flat": "bthd", "merged_bh": "bhtd"}
    return names.get(case.layout, case.layout)


def outer_labels(case: Case) -> str:
    """Returns the batch labels: none, "b" or "ab"."""
    return "".join(c for c in "ab" if c in query_labels(case))


def key_labels(case: Case) -> str:
    return query_labels(case).replace("h", "n").replace("t", "s")


def value_labels(case: Case) -> str:
    return key_labels(case).replace("d", "e")


def side_labels(case: Case, labels: str) -> str:
    """Writes the batch of a side as the layout has it."""
    return labels.replace("b", outer_labels(case))


def first_input(case: Case) -> str:
    """Returns the name of the array that the queries come from."""
    return "q" if case.source == "separate" else "x"


def _source_shapes(case: Case) -> dict[str, str]:
    """Returns the labels of each array that q, k, v are made of."""
    outer = outer_labels(case)
    if case.source == "fused":
        return {"x": outer + "tm", "w": "m*"}
    if case.source == "projected":
        return {
            "x": outer + "tm", "y": outer + "sm", "wq": "mhd", "wk": "mnd", "wv": "mne",
        }  # fmt: skip
    if case.source == "self":
        return {"x": query_labels(case)}
    return {"q": query_labels(case), "k": key_labels(case), "v": value_labels(case)}


def _mask_arrays(case: Case, rng: np.random.Generator, extent: Callable) -> dict:
    found = {}
    for mask in (case.mask, case.mask2):
        if mask == "lengths":
            shape = extent(side_labels(case, "b"))
            found["lengths"] = rng.integers(0, case.keys + 1, shape, dtype=np.int32)
        elif mask in ("valid", "causal_and_valid"):
            found["valid"] = rng.random(extent(side_labels(case, "bs"))) < 0.7
        elif mask == "segments":
            for name, label in (("q_segments", "t"), ("k_segments", "s")):
                shape = extent(side_labels(case, "b") + label)
                numbers = np.sort(rng.integers(0, 3, shape), axis=-1)
                found[name] = numbers.astype(np.int32)
        elif mask in DENSE_LABELS and "dense" not in found:
            labels = side_labels(case, DENSE_LABELS[mask])
            share = 0.3 if mask == "sparse_rows" else 0.7
            found["dense"] = rng.random(extent(labels)) < share
    return found


def _side_arrays(case: Case, rng: np.random.Generator, extent: Callable) -> dict:
    """Returns the float arrays beside q, k, v that the program needs."""
    normal, uniform = rng.standard_normal, rng.uniform
    out_labels = query_labels(case).replace("d", "e")
    found: dict[str, np.ndarray] = {}
    if case.bias in INPUT_BIASES:
        found["bias"] = normal(extent(side_labels(case, case.bias)))
    if case.bias == "alibi":
        found["slopes"] = uniform(0.1, 0.6, extent("h"))
    if case.bias == "t5":
        found["table"] = normal((5, case.heads))
    if case.scale == "learned":
        found["scale"] = uniform(0.3, 0.8, ())
    if case.scale.startswith("temperature"):
        found["temperature"] = uniform(0.5, 1.5, extent("h"))
    if case.function == "learned_softcap":
        found["cap"] = uniform(2.0, 3.0, ())
    if case.norm == "rms_gain":
        found["gain"] = uniform(0.7, 1.3, extent("d"))
    if case.mutation == "input_multiplier":
        found["multiplier"] = uniform(0.5, 1.5, extent("ts"))
    if case.mutation == "mixed_heads":
        found["mix"] = normal(extent("xh"))
    if case.loop != "none":
        found["weights"] = uniform(0.6, 1.3, (case.depth,))
    if case.consume in ("weighted", "twice") or case.mode == "vjp":
        found["dout"] = normal(extent(out_labels))
    if case.consume == "project":
        found["wo"] = normal((case.heads * case.values, MODEL))
    return found


def _patterned(case: Case, name: str, labels: str, shape, rng) -> np.ndarray:
    """Returns q, k, v or what they come from, with the case's pattern."""
    array = rng.standard_normal(shape)
    if case.inputs == "tiny":
        return array * 1e-3
    if case.inputs == "integers":
        return rng.integers(-2, 3, shape).astype(np.float64)
    if case.inputs == "large" and name in ("q", "k", "wq", "x"):
        return array * 4
    if case.inputs == "equal" and name in ("q", "x"):
        return array * 0
    if case.inputs == "repeated":
        axis = next((i for i, c in enumerate(labels) if c in "ts"), None)
        if axis is not None:
            rows = np.arange(shape[axis]) // 2 * 2
            return np.take(array, rows, axis)
    return array


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """Returns the program's inputs by name, in the case's dtype."""
    rng = np.random.default_rng(case.seed)
    sizes = sizes_of(case)
    fused = case.heads * (2 * case.head_dim + case.values)

    def extent(labels: str) -> tuple[int, ...]:
        return tuple(fused if c == "*" else sizes[c] for c in labels)

    floats = {}
    for name, labels in _source_shapes(case).items():
        shape = extent(labels)
        stacked = case.mode in STACKED and name == first_input(case)
        array = _patterned(case, name, labels, shape, rng)
        if case.layout == "flat" and name in ("q", "k", "v"):
            array = array.reshape(*shape[:2], -1)
        if stacked:
            array = np.stack([array, rng.standard_normal(array.shape)])
        floats[name] = array
    floats |= _side_arrays(case, rng, extent)
    arrays = {name: np.asarray(x, DTYPES[case.dtype]) for name, x in floats.items()}
    return arrays | _mask_arrays(case, rng, extent)


STACKED = ("vmap_value", "vmap_grad", "grad_vmap")


def widened(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the same numbers with every float array in float64."""
    return {
        name: x if x.dtype.kind in "bi" else x.astype(np.float64)
        for name, x in arrays.items()
    }


def wanted_names(case: Case, arrays: dict) -> list[str]:
    """Returns the arrays whose gradients the program takes."""
    floats = [name for name, x in arrays.items() if x.dtype.kind not in "bi"]
    main = [name for name in ("q", "k", "v", "x", "y") if name in floats]
    groups = {
        "qkv": main,
        "q": [first_input(case)],
        "k": [name for name in ("k", "wk") if name in floats],
        "v": [name for name in ("v", "wv") if name in floats],
        "kv": [name for name in ("k", "v", "y", "wk", "wv") if name in floats],
        "params": [name for name in floats if name not in main],
    }
    return groups.get(case.wanted) or floats
