"""The numbers that the paper prints, "Clustering and Token Denoising for Faster and More Robust VLMs", the ready
configurations that reproduce them, and the look-up between the two."""

from clustrs.paper.lookup import MODELS, PaperReference, find_reference, paper_model, paper_value
from clustrs.paper.tables import SCORE_TABLES, TABLES, TITLE, PaperCell, paper_table

__all__ = [
    "MODELS",
    "SCORE_TABLES",
    "TABLES",
    "TITLE",
    "PaperCell",
    "PaperReference",
    "find_reference",
    "paper_model",
    "paper_table",
    "paper_value",
]
