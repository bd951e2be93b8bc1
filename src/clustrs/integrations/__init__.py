"""Doors to other systems, each optional and imported only when it is used."""
