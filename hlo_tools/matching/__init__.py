"""Matching by meaning: index spaces, scalar expressions and the patterns on them.

A value of the program is read as a scalar expression over index atoms
(``index_space``, ``expressions``, ``reader``); a pattern (``softmax``,
``scores``, ``attention``) then asks what that expression computes, and never
how its operations were laid out.
"""
