"""One fuzzed program as data: drawn, repaired, printed, shrunk.

A `Case` says everything about a program and its inputs. Its defaults are the
simplest choices, so a short repr is a simple program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np


@dataclass(frozen=True, repr=False)
class Case:
    """One program. A size of 0 means: as its partner (k_len as q_len, ...)."""

    seed: int = 0
    batch: int = 1
    q_len: int = 3
    k_len: int = 0
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 2
    value_dim: int = 0
    cube: bool = False  # every extent but the batch is q_len
    dtype: str = "float32"
    score_dtype: str = "same"
    layout: str = "bthd"
    source: str = "separate"
    product: str = "einsum"
    value_product: str = "einsum"
    order: int = 0
    gqa: str = "repeat"
    mapped: str = ""
    scale: str = "multiplied"
    norm: str = "none"
    function: str = "none"
    bias: str = "none"
    bias_last: bool = False
    mask: str = "none"
    mask2: str = "none"
    form: str = "where"
    fill: str = "-1e30"
    softmax: str = "jax"
    softmax_dtype: str = "same"
    mutation: str = "none"
    backward: str = "none"
    stop: str = "none"
    mode: str = "value"
    wanted: str = "all"
    aux: str = "none"
    remat: str = "none"
    remat_scope: str = "core"
    loop: str = "none"
    depth: int = 2
    sites: str = "one"
    consume: str = "weighted"
    inputs: str = "normal"

    def __repr__(self) -> str:
        parts = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Case({', '.join(parts)})"

    @property
    def keys(self) -> int:
        """S."""
        return self.k_len or self.q_len

    @property
    def heads(self) -> int:
        """H."""
        return self.kv_heads * self.group

    @property
    def values(self) -> int:
        """Dv."""
        return self.value_dim or self.head_dim

    @property
    def mutated(self) -> bool:
        """Whether this only looks like attention, forward or backward."""
        changed = self.backward not in FAITHFUL_BACKWARDS
        return self.mutation not in FAITHFUL_MUTATIONS or changed

    @property
    def differentiated(self) -> bool:
        return self.mode not in ("value", "vmap_value")

    @property
    def narrow(self) -> bool:
        return self.dtype in ("bfloat16", "float16")

    def but(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)


# Spelled otherwise, but attention in real arithmetic.
FAITHFUL_MUTATIONS = (
    "none", "max_other_axis", "max_halved", "shifted_exp", "base_three",
    "rolled_values", "key_weights", "negated_twice", "shared_qk", "keys_as_values",
    "other_head",
)  # fmt: skip
FAITHFUL_BACKWARDS = ("none", "softmax_exact", "core_exact", "core_flash")
# Need as many keys as queries.
SQUARE_MUTATIONS = (
    "transposed", "plus_transposed", "axis_t", "p_transposed", "p_residual",
)  # fmt: skip
# Jump with the score: the rounding of a narrow type decides on which side.
JUMPING = ("self_masked", "rounded", "threshold")
UNSAFE = ("unsafe", "late_unsafe", "exp2_unsafe")
FORWARD_MODES = ("jvp", "hvp", "linearize")
SECOND_ORDER = ("hvp", "grad_grad")


def mostly(default: Any, *others: Any, odds: int = 1) -> tuple:
    """Options of which the first is drawn `odds` times as often as all others."""
    return (default,) * (odds * len(others)) + others


# What each field is drawn from, uniformly; the order is that of drawing.
CHOICES: dict[str, Sequence] = {
    "seed": range(2**31),
    "batch": (1, 2),
    "q_len": range(2, 13),
    "k_len": mostly(0, *range(2, 13)),
    "kv_heads": (1, 2, 3),
    "group": mostly(1, 2, 3, odds=2),
    "head_dim": range(2, 9),
    "value_dim": mostly(0, 2, 3, 5, 8, odds=2),
    "cube": mostly(False, True, odds=9),
    "dtype": ("float32",) * 13 + ("float64",) * 4 + ("bfloat16",) * 2 + ("float16",),
    "score_dtype": mostly("same", "preferred", "cast"),
    "layout": (
        "bthd", "bthd", "bhtd", "bhtd", "thd", "hbtd", "tbhd", "abthd", "flat",
        "merged_bh", "dbht",
    ),
    "source": mostly("separate", "fused", "projected", "self", odds=2),
    "product": (
        *("einsum", "swapped", "dot_general", "matmul", "vmap") * 6, "summed",
    ),
    "value_product": (
        *("einsum", "swapped", "dot_general", "matmul", "vmap") * 6, "summed",
    ),
    "order": mostly(0, *range(1, 24)),
    "gqa": ("repeat", "broadcast", "grouped", "grouped", "tile", "squeezed"),
    "mapped": mostly("", "h", "b", "bh", "hb", odds=2),
    "scale": (
        "multiplied", "multiplied", "divided", "divided", "on_q", "on_k", "q_divided",
        "split", "none", "negative", "learned", "temperature", "temperature_divided",
        "twice",
    ),
    "norm": mostly("none", "l2", "rms", "rms_gain", odds=4),
    "function": mostly(
        "none", "softcap", "softcap", "learned_softcap", "sine", "square", "relu",
        "clip", "polynomial", "absolute", odds=2,
    ),
    "bias": mostly(
        "none", "ts", "hts", "bhts", "bts", "hs", "s", "alibi", "alibi_constant", "t5",
        "distance", odds=1,
    ),
    "bias_last": mostly(False, True, odds=4),
    "mask": (
        *("none",) * 6, *("causal_tril", "causal_iota", "causal_constant") * 3,
        "causal_offset", "causal_late", "window", "band", "lengths", "valid",
        "segments", "dense", "dense_full", "dense_heads", "sparse_rows", "prefix",
        "strided", "blocks", "causal_and_valid",
    ),
    "mask2": mostly("none", "causal_iota", "valid", "dense", "window", odds=4),
    "form": (
        *("where", "add") * 4, "where_not", "float", "blend", "minimum", "multiplied",
        "full", "select", "added_last",
    ),
    "fill": (
        *("-1e30", "-inf", "min", "-1e9") * 3, "-1e4", "-3.0", "0.0",
    ),
    "softmax": (
        *("jax", "stable", "stable_stop") * 11, "where", "unsafe", "lse", "log_softmax",
        "late", "late_unsafe", "reciprocal", "exp2", "exp2_unsafe", "max_all",
        "sum_product", "ones_column", "clamped_max",
    ),
    "softmax_dtype": mostly("same", "float32"),
    "mutation": mostly(
        "none", "two_products", "transposed", "plus_transposed", "shared_qk",
        "keys_as_values", "other_head", "rolled_values", "axis_t", "axis_h", "axis_ts",
        "sum_other_axis", "max_other_axis", "max_halved", "sum_epsilon", "sum_one",
        "no_sum", "relu_attention", "sigmoid_attention", "base_three", "softmax_twice",
        "shifted_exp", "partial_sum", "scaled", "fixed_multiplier", "input_multiplier",
        "dropout", "masked_after", "squared", "p_transposed", "rolled", "epsilon_added",
        "threshold", "mean_heads", "mixed_heads", "cumulative", "p_residual",
        "times_scores", "row_weights", "key_weights", "self_masked", "sink",
        "negated_twice", "rounded", "running_max", odds=3,
    ),
    "backward": mostly(
        "none", "softmax_exact", "softmax_through", "softmax_doubled",
        "softmax_no_rowsum", "softmax_clipped", "softmax_zero", "softmax_masked",
        "core_exact", "core_doubled", "core_clipped", "core_other_scale",
        "core_other_mask", "core_v_only", "core_flash", "core_flash_no_delta",
        odds=9,
    ),
    "stop": mostly("none", "q", "k", "v", "probs", "scores", odds=5),
    "mode": (
        *("value",) * 12, *("value_and_grad", "vjp") * 7,
        *("grad",) * 3, "jvp", "hvp",
        "grad_grad", "linearize", "vmap_value", "vmap_grad", "grad_vmap", "accumulate",
        "accumulate", "sgd",
    ),
    "wanted": mostly("all", "qkv", "q", "k", "v", "kv", "params"),
    "aux": mostly("none", "probs", "scores", "lse", odds=4),
    "remat": mostly(
        "none", "nothing_saveable", "everything_saveable", "dots_saveable",
        "dots_with_no_batch_dims_saveable", "checkpoint_dots", "full", "full_cse",
        "save_only_these_names", "save_anything_except_these_names",
        "save_any_names_but_these", "checkpoint_dots_with_no_batch_dims",
    ),
    "remat_scope": ("core", "layer", "loss"),
    "loop": mostly(
        "none", "scan", "scan_unrolled", "scan_carried", "nested", "python", odds=2
    ),
    "depth": (1, 2, 3, 4),
    "sites": mostly(
        "one", "shared_kv", "shared_probs", "chain", "two_masks", "k_is_v", odds=2
    ),
    "consume": (
        "weighted", *("square", "twice", "project") * 3, "mean", "flatten",
    ),
    "inputs": (*("normal",) * 6, "large", "repeated", "equal", "tiny", "integers"),
}  # fmt: skip


def repaired(case: Case) -> Case:
    """Returns the nearest case in which every choice fits the others."""
    for repair in (_repair_sizes, _repair_numbers, _repair_transforms):
        case = case.but(**repair(case))
    return case


def _repair_sizes(case: Case) -> dict[str, Any]:
    new: dict[str, Any] = {}
    square = case.mutation in SQUARE_MUTATIONS or case.source in ("fused", "self")
    if square or case.loop == "scan_carried":
        new["k_len"] = 0
    if case.cube:
        size = min(case.q_len, 4)
        new |= {"q_len": size, "k_len": 0, "kv_heads": size, "group": 1}
        new |= {"head_dim": size, "value_dim": 0}
    alike = case.loop != "none" or case.sites in ("chain", "k_is_v")
    if alike or case.source == "self" or case.mutation == "keys_as_values":
        new["value_dim"] = 0
    if case.source in ("fused", "self") or case.loop == "scan_carried":
        new["group"] = 1
    if case.layout == "merged_bh":
        new["mapped"] = ""
        if case.gqa in ("grouped", "squeezed"):
            new["gqa"] = "repeat"
    if case.gqa == "squeezed":
        new |= {"kv_heads": 1} if not case.cube else {"gqa": "repeat"}
    if case.layout == "thd":
        new["batch"] = 1
    if case.mutation != "none":
        new |= {"mapped": "", "sites": "one"}
    if case.softmax in ("late", "late_unsafe", "ones_column"):
        # These have no probabilities that a mutation could change.
        new |= {} if case.mutation == "none" else {"softmax": "stable"}
    return new


def _repair_numbers(case: Case) -> dict[str, Any]:
    new: dict[str, Any] = {}
    fill = case.fill
    if fill == "-inf" and case.form in ("float", "blend", "multiplied"):
        fill = "-1e30"  # infinity times zero is NaN
    if fill == "-inf" and case.loop == "scan_carried":
        fill = "-1e30"  # a row without keys is NaN, and a key of the next step
    if case.dtype == "float16" and fill in ("-1e30", "-1e9"):
        fill = "min"
    new["fill"] = fill
    if case.softmax in UNSAFE or case.mutation in ("sigmoid_attention", "no_sum"):
        new["inputs"] = "normal" if case.inputs == "large" else case.inputs
    if case.narrow and case.mutation in JUMPING:
        new["mutation"] = "none"
    if case.narrow and case.inputs == "large":
        new["inputs"] = "normal"
    if case.narrow and case.mode in SECOND_ORDER:
        new["mode"] = "grad"
    if case.softmax in UNSAFE and case.function in ("square", "polynomial"):
        new["function"] = "none"  # documented: an unsafe softmax must not overflow
    return new


def _repair_transforms(case: Case) -> dict[str, Any]:
    new: dict[str, Any] = {}
    if case.backward != "none":
        new |= {"mutation": "none", "softmax": "stable", "sites": "one"}
        new |= {"stop": "none", "aux": "none"}
        if case.mode in FORWARD_MODES or case.mode == "value":
            new["mode"] = "grad"
        if case.backward.startswith("core") and case.mode in SECOND_ORDER:
            new["mode"] = "grad"  # JAX can't batch the residuals of such a rule
    if case.loop != "none":
        new |= {"aux": "none", "sites": "one"}
    if case.loop == "python" or case.mode in SECOND_ORDER:
        new["depth"] = min(case.depth, 2)  # each layer is compiled anew
    if case.remat != "none" and case.mode == "vmap_value":
        new["mode"] = "vmap_grad"
    return new


def draw_case(choose: Callable[[Sequence], Any]) -> Case:
    """Draws a case.

    Args:
      choose: returns one element of a sequence.
    """
    drawn = {name: choose(options) for name, options in CHOICES.items()}
    return repaired(Case(**drawn))


def random_case(seed: int, number: int) -> Case:
    """Returns the case of a number in the run of a seed, always the same."""
    rng = np.random.default_rng((seed, number))
    return draw_case(lambda options: options[int(rng.integers(len(options)))])


@st.composite
def cases(draw) -> Case:
    """The Hypothesis strategy."""
    return draw_case(lambda options: draw(st.sampled_from(options)))


def simplified(case: Case, fails: Callable[[Case], bool], attempts: int = 80) -> Case:
    """Resets choices to their defaults as long as the case still fails.

    Args:
      case: one for which `fails` is true.
      fails: whether a case shows the fault.
      attempts: how often `fails` may be called.
    """
    tried = {case}
    changed = True
    while changed:
        changed = False
        for f in reversed(dataclasses.fields(Case)):
            new = repaired(case.but(**{f.name: f.default}))
            if new in tried:
                continue
            if len(tried) > attempts:
                return case
            tried.add(new)
            if fails(new):
                case, changed = new, True
    return case
