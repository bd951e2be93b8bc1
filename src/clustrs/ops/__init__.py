"""The mathematics: pure batched tensor functions. No model, no files, no state."""
