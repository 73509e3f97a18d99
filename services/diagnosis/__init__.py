"""`baton doctor` and `baton debug bundle`: faults of a machine or a deployment, and bug reports."""
