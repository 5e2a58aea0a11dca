"""Kernels: the mathematics of the metrics, as pure functions of tensors.

A kernel takes tensors, returns tensors in float64, and leaves its inputs unchanged. It raises a
`ValueError` that names the shape and the expectation where it cannot measure its input; a value
that does not exist (the anisotropy of rows that are all equal) is NaN. Kernels import nothing of
the package but other kernels, each from the module of its subject: `geomon.kernels.spectrum`.
"""
