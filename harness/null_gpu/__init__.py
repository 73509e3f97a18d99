"""A GPU without arithmetic, so that the CUDA paths of vLLM and Baton run on a machine without a GPU.

Device memory is the host's, copies copy, and kernels are compiled and launched but do nothing.
`make null-gpu` makes an environment for it, and runs tests/null_gpu there.
"""
