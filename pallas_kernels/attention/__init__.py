"""Attention: implementations of the `hlo_tools.attention` composite.

| file | runs on | what it is |
|---|---|---|
| online.py | anything | online softmax in plain JAX, any scores, tile by tile: |
| online_forward.py, online_backward.py | | its two halves, over the tiles of |
| online_tiling.py | | blocks, and the scores of one tile |
| online_grad.py | | both halves, as `Implementation.grad` |
| rows.py | CPUs | the form of "online" for named scores, which XLA fuses whole |
| cudnn.py | NVIDIA GPUs | cuDNN's fused attention |
| tpu.py | TPUs | the flash and splash attention that ship inside JAX |
| cost.py | - | predicted times, of these and of XLA's own code |
| cost_grad.py | - | the same with the backward pass |

online, cudnn and tpu have an `IMPLEMENTATION` each, see `hlo_tools.composites`.
"""
