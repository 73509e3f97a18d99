"""The KV cache's way from a prefill worker to a decode worker."""
