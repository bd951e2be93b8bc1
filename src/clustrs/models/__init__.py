"""Transformers models: encode images, score and prune their tokens, compact the prompt, generate."""
