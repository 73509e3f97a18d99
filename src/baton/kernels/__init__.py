"""Operations with a naive, a CPU and a GPU form; links to the files of the root folder `kernels`.

That folder is not a package itself, because it would hide Hugging Face's package `kernels` from programs
started in the root folder.
"""
