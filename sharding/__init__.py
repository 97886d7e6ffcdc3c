"""Sharding plans for JAX programs: meshes, rules, collectives and planning.

Import it as ``import sharding as shd``. It may import the core of ``hlo_tools``
and never ``pallas_kernels``.
"""
