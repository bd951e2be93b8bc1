"""Pruned models in vLLM: the plugin that vLLM finds by its entry point, and the command that starts a server.

    plugin.py   registers the pruned models, and checks the key `clustrs` of a model's config; needs no vLLM to check
    server.py   checks, and the command line of vLLM's server
    pruning.py  code that all pruned models share: placeholders, metrics, scores, M-RoPE positions
    llava.py    LLaVA-1.5 and LLaVA-OneVision
    qwen_vl.py  Qwen2.5-VL and Qwen3-VL
    embeddings.py  pruned images for a server on another machine

Modules that import vLLM are imported by vLLM alone.
"""
