"""A GPU without the arithmetic: vLLM's and Baton's CUDA paths run on a machine that has none.

Device memory is the host's, copies copy, kernels are compiled, launched and do nothing. `make null-gpu` makes
an environment of its own around it, and runs tests/null_gpu there.
"""
