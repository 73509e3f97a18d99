"""Offline use: many prompts, from Python or from a file, run by a deployment that ends with its user.

`from baton import pipeline` is pipeline.py (prompts.py), `baton batch` is batch.py
(batch_file.py). Both use deployment.py, a private deployment, which supervised.py runs in another process.
"""
