"""What `pallas_kernels.attention` says to bad input, by the name of the argument."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from hlo_tools.errors import UnknownNameError
from pallas_kernels import attention
from pallas_kernels.attention.online_tiling import Blocks

Q, KV = np.ones((2, 4, 4, 8), np.float32), np.ones((2, 6, 2, 8), np.float32)

# name -> arguments, the error and the start of its message
WRONG = {
    "rank": ({"q": Q[0, 0]}, ValueError, r"q: got shape \(4, 8\), expected"),
    "no array": ({"k": [1.0]}, TypeError, "k: got list, expected an array"),
    "batch": ({"q": Q[:1]}, ValueError, r"q, k, v: got batch dims \(1,\), \(2,\)"),
    "head dim": ({"q": Q[..., :7]}, ValueError, "k: got head dim 8, expected that"),
    "length": ({"v": KV[:, :5]}, ValueError, r"v: got length and heads \(5, 2\)"),
    "heads": ({"q": Q[:, :, :3]}, ValueError, "k: got 2 heads, expected a divisor"),
    "dtypes": (
        {"q": Q.astype(np.float16)}, TypeError, "q, k, v: got float16, float32",
    ),
    "integers": (
        {name: x.astype(np.int32) for name, x in (("q", Q), ("k", KV), ("v", KV))},
        TypeError, "q: got int32, expected one of bfloat16",
    ),
    "bias shape": ({"bias": Q}, ValueError, r"bias: got shape \(2, 4, 4, 8\)"),
    "bias of bool": (
        {"bias": np.ones((4, 6), bool)}, TypeError, "bias: got bool, .* is a mask",
    ),
    "mask dtype": ({"mask": np.ones((4, 6))}, TypeError, "mask: got float.* is a bias"),
    "mask shape": (
        {"mask": np.ones((5, 6), bool)}, ValueError, r"mask: got shape \(5, 6\)",
    ),
    "half the segments": (
        {"q_segment_ids": np.zeros(4, int)}, ValueError, "kv_segment_ids: got None",
    ),
    "segments of floats": (
        {"q_segment_ids": np.zeros(4), "kv_segment_ids": np.zeros(6, int)},
        TypeError, "q_segment_ids: got float",
    ),
    "lengths": (
        {"kv_lengths": np.zeros(3, int)}, ValueError, r"kv_lengths: got shape \(3,\)",
    ),
    "sinks": (
        {"sinks": np.zeros(2, np.float32)}, ValueError, r"sinks: got shape \(2,\)",
    ),
    "scale": ({"scale": jnp.ones(())}, TypeError, "scale: got .*, expected a Python"),
    "infinite scale": ({"scale": math.inf}, ValueError, "scale: got inf"),
    "softcap": ({"softcap": 0}, ValueError, "softcap: got 0.0, expected a positive"),
    "causal": ({"causal": np.ones(2)}, TypeError, "causal: got ndarray, expected True"),
    "offset": ({"offset": 1.5}, TypeError, "offset: got float, expected a Python int"),
    "window": ({"window": (1, 2, 3)}, ValueError, r"window: got \(1, 2, 3\)"),
    "negative window": ({"window": -1}, ValueError, "window: got -1"),
    "no names": ({"implementation": []}, ValueError, "implementation: got an empty"),
    "unknown name": (
        {"implementation": "onlien"}, UnknownNameError, "unknown implementation",
    ),
    "config that divides nothing": (
        {"implementation": "online", "config": Blocks(1, 3, 16, 16)},
        ValueError, "config: got Blocks.*, expected a kv_heads that divides 2",
    ),
    "config for any": (
        {"config": Blocks(1, 1, 16, 16)}, ValueError, "config: is for one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(name: str) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        attention(**{"q": Q, "k": KV, "v": KV, **arguments})
