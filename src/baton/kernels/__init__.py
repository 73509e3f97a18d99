"""Operations with a naive, a CPU and a GPU form; links to the files of the root folder `kernels`.

That folder is no package of its own: it would hide the package `kernels` of Hugging Face from whatever is
started in the root folder.
"""
