"""Correct faults of vLLM's CPU back end, each in a file of its own. On a GPU none of this is applied.

`tests/services/engine/patches/test_cpu.py` shows for each that the shipped function is wrong and the patched
one right: once vLLM's own is right, that test fails and names the patch to delete. The table says what is
wrong with each, and until when.
"""
