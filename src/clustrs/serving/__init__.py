"""Pruned models in vLLM: the plugin that vLLM finds by its entry point, and the command that starts a server.

plugin.py registers the pruned models and checks settings, server.py is the command; both need no vLLM. pruning.py is
shared by llava.py and qwen_vl.py, which vLLM alone imports. embeddings.py prunes for a server on another machine.
"""
