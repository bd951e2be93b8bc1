"""The one quantile that the tests need."""


def chi_square_limit(degrees: int) -> float:
    """A value that a chi-square variable exceeds about once in ten thousand times (Wilson and Hilferty)."""
    z, a = 3.72, 2 / (9 * degrees)
    return degrees * float(1 - a + z * a**0.5) ** 3
