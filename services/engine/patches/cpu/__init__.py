"""Patches for faults of vLLM's CPU back end, one file each. None of them is applied on a GPU.

`tests/services/engine/patches/test_cpu.py` shows that each shipped function is wrong and each patched one
right. When vLLM corrects its own function, that test fails and names the patch to delete.
"""
