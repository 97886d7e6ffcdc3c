"""Which backend takes what, as a table for the README: asked, not written down.

python -m pallas_kernels.attention.feature_table
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hlo_tools.targets import Target
from pallas_kernels.attention.backends import BACKENDS, STAND_INS, load_backend
from pallas_kernels.attention.problem import AttentionProblem

PLAIN = AttentionProblem(
    batch=2, q_len=512, k_len=512, heads=8, kv_heads=2, head_dim=128, value_dim=128,
    dtype="bfloat16", scale=0.1,
)  # fmt: skip

# feature -> what differs from PLAIN
FEATURES: dict[str, dict[str, Any]] = {
    "bfloat16, grouped heads": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "float64": {"dtype": "float64"},
    "head dim 80": {"head_dim": 80, "value_dim": 80},
    "head dim 256": {"head_dim": 256, "value_dim": 256},
    "head dim 512": {"head_dim": 512, "value_dim": 512},
    "value dim 64": {"value_dim": 64},
    "T = 500, S = 333": {"q_len": 500, "k_len": 333},
    "causal": {"causal": True},
    "causal, offset": {"causal": True, "offset": 100},
    "window": {"window": (64, 0)},
    "softcap": {"softcap": 30.0},
    "bias": {"bias": (1, 8, 512, 512), "bias_dtype": "bfloat16"},
    "bias of keys": {"bias": (2, 1, 1, 512), "bias_dtype": "bfloat16"},
    "float32 bias": {"bias": (1, 8, 512, 512), "bias_dtype": "float32"},
    "mask": {"mask": (2, 1, 512, 512)},
    "segments": {"segments": True},
    "lengths": {"q_lengths": True, "k_lengths": True},
    "sinks": {"sinks": True},
}


def feature_table() -> str:
    """Returns the table in Markdown, a row a feature, a column a backend."""
    lines = [" | ".join(["| feature", *BACKENDS]) + " |", "|---" * (len(BACKENDS) + 1)]
    lines[1] += "|"
    for feature, fields in FEATURES.items():
        problem = replace(PLAIN, **fields)
        cells = [_cell(name, problem) for name in BACKENDS]
        lines.append(" | ".join([f"| {feature}", *cells]) + " |")
    flags = {
        "gradient of the logsumexp": lambda x: not getattr(x, "takes_out", False),
        "deterministic gradients": lambda x: getattr(x, "deterministic", True),
    }
    for feature, has in flags.items():
        cells = ["yes" if has(load_backend(name)) else "no" for name in BACKENDS]
        lines.append(" | ".join([f"| {feature}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(name: str, problem: AttentionProblem) -> str:
    backend = load_backend(name)
    target = Target.parse(STAND_INS[backend.platforms[0]])
    seen = replace(problem, sinks=False)  # the API's own work
    if backend.supports(seen, target) is not None:
        return "no"
    wants_bias = problem.bias is not None
    if backend.supports_backward(seen, target, wants_bias) is None:
        return "yes"
    refused = backend.supports_backward(seen, target, False) is not None
    return "forward only" if refused else "no gradient of it"


if __name__ == "__main__":
    print(feature_table(), end="")
