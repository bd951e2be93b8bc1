"""Pruned models in vLLM: the plugin that vLLM finds by its entry point, and the command that starts a server.

    config.py   what the key `clustrs` of a model's config may say; needs no vLLM
    plugin.py   registers the pruned models, and sends a config with that key to them
    scores.py   the attention scores of vLLM's vision towers, whole where heads are split over ranks
    pruning.py  what all pruned models share: placeholders, selection, metrics
    llava.py    LLaVA-1.5 and LLaVA-OneVision
    qwen_vl.py  Qwen2.5-VL and Qwen3-VL
    mrope.py    their positions: those that survivors had in the whole prompt; needs no vLLM
    server.py   checks, and the command line of vLLM's server
    embeddings.py  pruned images for a server on another machine

Modules that import vLLM are imported by vLLM alone.
"""
