"""Which kinds of things stand together in a collage."""

from numpy.random import Generator

from clustrs.images.photos.collage import PLACES
from clustrs.images.photos.kinds import KINDS, Kind

ANIMALS = (0.3, 0.3, 0.2, 0.12, 0.08)
"""How often a collage has 0 to 4 animals: every number occurs, and animals are not much more frequent than others."""


def draw_kinds(generator: Generator, animals: int | None = None) -> list[Kind]:
    """Four different kinds in random order, with a random number of animals or the given one."""
    count = int(generator.choice(len(ANIMALS), p=ANIMALS)) if animals is None else animals
    inside = [kind for kind in KINDS if kind.group == "animal"]
    outside = [kind for kind in KINDS if kind.group != "animal"]
    chosen = [inside[i] for i in generator.choice(len(inside), count, replace=False)]
    chosen += [outside[i] for i in generator.choice(len(outside), len(PLACES) - count, replace=False)]
    return [chosen[i] for i in generator.permutation(len(chosen))]
