"""Attention: implementations of the `hlo_tools.attention` composite.

| file | runs on | what it is |
|---|---|---|
| online.py | anything | online softmax in plain JAX, any scores, tile by tile |
| rows.py | CPUs | the form of "online" for named scores, which XLA fuses whole |
| cudnn.py | NVIDIA GPUs | cuDNN's fused attention |
| tpu.py | TPUs | the flash and splash attention that ship inside JAX |
| cost.py | - | predicted times, of these and of XLA's own code |

online, cudnn and tpu have an `IMPLEMENTATION` each, see `hlo_tools.composites`.
"""
