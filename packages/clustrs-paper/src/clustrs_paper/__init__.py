"""The paper "Clustering and Token Denoising for Faster and More Robust VLMs" for clustrs.

Its tables (`tables`, `lookup`), its ready configurations (`clustrs eval --config paper/...`), its studies (`clustrs
study`), its numbers beside those of a run in reports (`reference`), and the evidence page (`evidence`).
"""

__version__ = "0.2.0"
