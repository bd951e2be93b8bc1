"""The library's random numbers, in plain integers."""

import math


def mix(word: int) -> int:
    """MurmurHash3's finaliser."""
    word ^= word >> 16
    word = word * 0x85EBCA6B % 2**32
    word ^= word >> 13
    word = word * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def uniform(seed: int, step: int, token: int) -> float:
    """A number in (0, 1) that depends on these three alone."""
    key = mix((mix((step + seed % 2**32) % 2**32) + seed // 2**32) % 2**32)
    word = mix((key + token * 0x9E3779B9) % 2**32)
    return (word // 2**9 + 0.5) / 2**23


def waiting_time(seed: int, step: int, token: int) -> float:
    return -math.log(uniform(seed, step, token))
