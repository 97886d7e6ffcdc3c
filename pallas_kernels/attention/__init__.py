"""Attention: a function for users, and implementations of `hlo_tools.attention`.

`attention` is the function. A call is an `AttentionProblem` and its `Operands`
(problem.py), which arguments.py makes, differentiable.py gives gradients and vmap,
and a backend of the table in backends.py computes:

| file | backend | runs on |
|---|---|---|
| gpu.py | "mosaic-gpu", Pallas kernels | Hopper GPUs |
| tpu_backend.py | "tpu", Pallas kernels | TPUs |
| cudnn_backend.py | "cudnn", cuDNN's fused attention | NVIDIA GPUs |
| reference.py | "reference", all scores in memory | anything |
| online_backend.py | "online", online softmax in plain JAX | anything |

The compiler stage binds sites of the composite `hlo_tools.attention` to:

| file | runs on | what it is |
|---|---|---|
| online.py | anything | online softmax in plain JAX, any scores, tile by tile: |
| online_forward.py, online_backward.py | | its two halves, over the tiles of |
| online_backward_tiles.py, | | the loops and tiles of the backward half, |
| online_backward_state.py | | and what they hand to each other |
| online_tiling.py | | blocks, and the scores of one tile |
| online_grad.py | | both halves, as `Implementation.grad` |
| rows.py | CPUs | the form of "online" for named scores, which XLA fuses whole |
| cudnn.py, cudnn_grad.py | NVIDIA GPUs | cuDNN's fused attention |
| gpu_binding.py, gpu_plan.py | Hopper GPUs | our Pallas kernels, both halves |
| tpu.py | TPUs | the flash and splash attention that ship inside JAX |
| tpu_grad.py | TPUs | Pallas kernels for attention with its backward pass |
| gpu_family.py | Hopper GPUs | configurations of our kernels, their limits and times: |
| hopper_attention.py | | the work of each kernel, a tile at a time |
| hopper_model.py, hopper_tiles.py | | what that takes; tiles, waves and traffic |
| gpu_presets.py | | problems to measure |
| cost.py | - | predicted times, of these and of XLA's own code |
| cost_accelerators_grad.py | - | of cuDNN and the TPU kernels with a backward pass |
| cost_gpu.py | - | of our kernels for Hopper GPUs, against cuDNN |
| cost_grad.py | - | the same with the backward pass |

online, cudnn, gpu_binding and tpu have an `IMPLEMENTATION` each, see
`hlo_tools.composites`; its `grad` runs a site together with its backward pass, see
`hlo_tools.gradients`.
"""

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.problem import AttentionProblem

__all__ = ["AttentionProblem", "attention"]
