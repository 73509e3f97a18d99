"""The view of a deployment that `baton status`, `baton top` and the live page share.

workers     workers as rows, with rates
gangs       gangs as units
changes     the differences between two sets of rows, in words
commands    operators' questions to schedulers, and actions on workers
"""
