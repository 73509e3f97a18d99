"""Admit a request's images: find, fetch, check and decode them before vLLM renders the request."""
