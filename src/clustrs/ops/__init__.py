"""Batched tensor operations of the methods: no model, no files, no state."""
