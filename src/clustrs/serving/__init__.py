"""Pruned models in vLLM. plugin.py, which vLLM finds by its entry point, and server.py, the command, need no vLLM."""
