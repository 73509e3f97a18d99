"""Turn NIXL's progress thread off, for bench/peers.py: vLLM 0.32 has no setting for it."""

from nixl_cu12 import _api

_made = _api.nixl_agent_config.__init__.__defaults__
_api.nixl_agent_config.__init__.__defaults__ = (False, *_made[1:])  # enable_prog_thread is the first
