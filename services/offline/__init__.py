"""Offline use: many prompts, from Python or from a file, run by a deployment that ends with its user.

`from baton import pipeline` is pipeline.py (prompts.py, responses.py), `baton batch` is batch.py
(batch_file.py). Both use deployment.py, a private deployment, with supervised.py at its other end.
"""
