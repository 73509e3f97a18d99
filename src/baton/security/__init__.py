"""Certificates of the processes of a deployment, and which calls they permit (docs/security.md)."""
