"""Kernels: pure functions of tensors. They import nothing of the package but one another.

A kernel takes tensors, returns tensors in float64, and leaves its inputs unchanged. Called directly
on something it cannot measure it raises a `ValueError` that names the shape and the expectation; a
value that does not exist (the anisotropy of rows that are all equal) is NaN.
"""
