"""The steps of the clustering as ordinary operations, on every device: what `fused` has kernels for."""

from clustrs.ops.geometry import squared_distances as squared_distances
from clustrs.ops.kmeans import refine as refine
from clustrs.ops.kmeans import representatives as representatives
from clustrs.ops.kmeans import seeding as seeding
from clustrs.ops.shrinkage import shrink_to_means as shrink_to_means
