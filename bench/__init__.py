"""What is measured, against what. `python -m bench --help`; results as JSON in bench/results/."""
