"""One file per family of models; `base` has the contract."""
