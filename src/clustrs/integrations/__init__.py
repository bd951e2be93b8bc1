"""Other people's programs that run pruned models: one package per program, which imports it only when it calls us."""
