"""A GPU without arithmetic: it runs the CUDA paths of vLLM and Baton on a machine without a GPU.

Device memory is host memory, copies copy, and kernels are compiled and launched but do nothing.
`make null-gpu` makes an environment for it and runs tests/null_gpu there.
"""
