"""Kernels: the mathematics of the metrics, as pure functions of tensors.

A kernel takes tensors, returns float64 tensors, and leaves its inputs unchanged. It raises a
`ValueError` that names the shape and the expectation if it cannot measure its input; a value that
does not exist (the anisotropy of equal rows, for example) is NaN. Kernels import only other kernels
of the package, each from the module of its subject, such as `geomon.kernels.spectrum`.
"""
