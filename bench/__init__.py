"""Benchmarks: `python -m bench --help`; results are JSON files in bench/results/."""
