"""Operations with a CPU and a GPU implementation, linked from the root folder `kernels`.

That folder is not a package, because it would hide Hugging Face's package `kernels` from programs started in
the root folder.
"""
