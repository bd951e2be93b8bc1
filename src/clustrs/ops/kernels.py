"""Triton kernels for a whole selection in a few launches: what `ops.dispatch` calls. Importing this needs Triton.

One program handles one image, or one cluster of one image, with all N tokens in a block, in float32. Divisions and
roots are the correctly rounded ones, and ties go to the first token: so they choose what the plain operations choose.
"""

import triton
import triton.language as tl

ROUNDING: tl.constexpr = tl.constexpr(2.0**-18)
"""`distances.ROUNDING`, for the compiler: a power of two, so that a product with it is exact."""


@triton.jit
def distances_kernel(gram, out, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per `ROWS` tokens: their squared distances, from the upper half of the Gram matrix."""
    image = tl.program_id(1).to(tl.int64) * n * n
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token = tl.arange(0, BLOCK)[None, :]
    inside = (i < n) & (token < n)
    at = tl.where(token >= i, i * n + token, token * n + i)
    inner = tl.load(gram + image + at, mask=inside, other=0)
    own = tl.load(gram + image + i * n + i, mask=i < n, other=0)
    norms = tl.load(gram + image + token * n + token, mask=token < n, other=0)
    tl.store(out + image + i * n + token, tl.maximum((inner * -2 + own) + norms, 0), mask=inside)


@triton.jit
def seeding_kernel(
    distances, noise, weight, scale, seeds, n, k, tau, lightest, HUBER: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per image: all k seeds, then the heaviest other tokens in place of those that no draw allowed."""
    image = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < n
    heavy = tl.load(weight + image * n + token, mask=inside, other=-1)
    near = tl.load(scale + image * n + token, mask=inside, other=0) * ROUNDING
    cost = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    repeated = tl.zeros([BLOCK], dtype=tl.int32)
    seed = tl.argmax(heavy, 0)
    valid = tl.where(tl.max(heavy, 0) > lightest, 1, 0)
    taken = tl.where(token == seed, valid, 0)
    tl.store(seeds + image * k, tl.where(valid == 1, seed, -1).to(tl.int64))
    for step in range(1, k):
        row = tl.load(distances + (image * n + seed) * n + token, mask=inside, other=0)
        same = row <= near
        repeated = tl.where(same, 1, repeated)
        row = tl.where(same, 0.0, row)
        if HUBER:
            radius = tl.sqrt_rn(row)
            row = tl.where(radius < tau, 0.5 * radius * radius, tau * (radius - 0.5 * tau))
        cost = tl.minimum(cost, row)
        rate = tl.div_rn(heavy, tl.load(noise + (step - 1) * n + token, mask=inside, other=1))
        seed = tl.argmax(tl.where(inside, cost * rate, -1.0), 0)
        chosen = token == seed
        new = tl.where(chosen & (repeated == 0), heavy, -1.0)
        valid = tl.where(tl.max(new, 0) > lightest, 1, 0)
        taken = tl.where(chosen, tl.maximum(taken, valid), taken)
        tl.store(seeds + image * k + step, tl.where(valid == 1, seed, -1).to(tl.int64))
    tl.debug_barrier()
    if tl.sum(taken, 0) < k:
        for step in range(0, k):
            if tl.load(seeds + image * k + step) < 0:
                spare = tl.argmax(tl.where(inside & (taken == 0), heavy, -1.0), 0)
                taken = tl.where(token == spare, 1, taken)
                tl.store(seeds + image * k + step, spare.to(tl.int64))


@triton.jit
def shares_kernel(labels, weight, own, shares, n, k, tau, least_sum, HUBER: tl.constexpr, BLOCK: tl.constexpr):
    """One program per cluster: the share of each token in its weighted mean."""
    j = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < n
    member = tl.load(labels + image * n + token, mask=inside, other=-1) == j
    part = tl.load(weight + image * n + token, mask=member, other=0)
    if HUBER:
        far = tl.load(own + image * n + token, mask=member, other=1)
        radius = tl.sqrt_rn(far)
        part = part * tl.where(radius > tau, tl.div_rn(tau, tl.maximum(radius, tau)), 1.0)
    total = tl.maximum(tl.sum(part, 0), least_sum)
    share = tl.div_rn(part, total)
    tl.store(shares + (image * k + j) * n + token, share, mask=inside)


@triton.jit
def assign_kernel(rows, shares, scale, labels, own, done, n, k, few, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """One program per image: the nearest center of every token, and whether the image is done. At first `rows` has the
    squared distances to the centers; later shares times distances, which become these."""
    image = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < n
    limit = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    for j in range(0, k):
        line = rows + (image * k + j) * n
        far = tl.load(line + token, mask=inside, other=0)
        if not FIRST:
            share = tl.load(shares + (image * k + j) * n + token, mask=inside, other=0)
            spread = tl.sum(share * far, 0) / 2
            far = tl.maximum(far - spread, 0)
            far = tl.where(tl.max(share, 0) == 0, float("inf"), far)
            tl.store(line + token, far, mask=inside)
        limit = tl.minimum(limit, far)
    limit += tl.load(scale + image * n + token, mask=inside, other=0) * ROUNDING
    tl.debug_barrier()
    update = tl.full([BLOCK], -1, dtype=tl.int64)
    for j in range(0, k):
        far = tl.load(rows + (image * k + j) * n + token, mask=inside, other=0)
        update = tl.where((update < 0) & (far <= limit), j, update)
    if not FIRST:
        before = tl.load(labels + image * n + token, mask=inside, other=-1)
        finished = tl.load(done + image)
        changed = tl.sum(tl.where(inside & (update != before), 1, 0), 0)
        update = tl.where(finished != 0, before, update)
        tl.store(done + image, tl.where(changed < few, 1, finished))
    tl.store(labels + image * n + token, update, mask=inside)
    nearest = tl.load(rows + (image * k + update) * n + token, mask=inside, other=0)
    tl.store(own + image * n + token, nearest, mask=inside)


@triton.jit
def representatives_kernel(labels, score, kept, numbered, slots, n, k, BLOCK: tl.constexpr):
    """One program per image: the best token of each cluster, and clusters numbered in raster order of these."""
    image = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < n
    label = tl.load(labels + image * n + token, mask=inside, other=-1)
    value = tl.load(score + image * n + token, mask=inside, other=-1)
    taken = tl.zeros([BLOCK], dtype=tl.int32)
    for j in range(0, k):
        member = tl.where(label == j, value, -1.0)
        best = tl.argmax(member, 0)
        alive = tl.where(tl.max(member, 0) >= 0, 1, 0)
        taken = tl.where(token == best, tl.maximum(taken, alive), taken)
        tl.store(slots + image * k + j, tl.where(alive == 1, best, -1).to(tl.int64))
    tl.debug_barrier()
    if tl.sum(taken, 0) < k:
        for j in range(0, k):
            if tl.load(slots + image * k + j) < 0:
                spare = tl.argmax(tl.where(inside & (taken == 0), value, -1.0), 0)
                taken = tl.where(token == spare, 1, taken)
                label = tl.where(token == spare, j, label)
                tl.store(slots + image * k + j, spare.to(tl.int64))
        tl.debug_barrier()
    rank = tl.cumsum(taken, 0) - 1
    renamed = tl.zeros([BLOCK], dtype=tl.int64)
    for j in range(0, k):
        best = tl.load(slots + image * k + j)
        order = tl.sum(tl.where(token == best, rank, 0), 0)
        renamed = tl.where(label == j, order.to(tl.int64), renamed)
        tl.store(kept + image * k + order, best)
    tl.store(numbered + image * n + token, renamed, mask=inside)


@triton.jit
def _median(value, member, size):
    """The median of values >= 0, which are ordered as their bits: found bit by bit, set if at most half come before."""
    bits = tl.where(member, value.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    low = size * 0
    for shift in range(0, 31):
        trial = low + (1 << (30 - shift))
        low = tl.where(tl.sum(tl.where(bits < trial, 1, 0), 0) <= (size - 1) // 2, trial, low)
    above = tl.min(tl.where(bits > low, bits, 0x7FFFFFFF), 0)
    high = tl.where(tl.sum(tl.where(bits <= low, 1, 0), 0) > size // 2, low, above)
    return (low.to(tl.float32, bitcast=True) + high.to(tl.float32, bitcast=True)) / 2


@triton.jit
def alpha_kernel(mixed, shares, labels, kept, scale, alpha, n, k, low, high, BLOCK: tl.constexpr):
    """One program per cluster: how much of its kept token stays, from the residuals of its members."""
    j = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < n
    line = (image * k + j) * n
    far = tl.load(mixed + line + token, mask=inside, other=0)
    share = tl.load(shares + line + token, mask=inside, other=0)
    far = tl.maximum(far - tl.sum(share * far, 0) / 2, 0)
    near = tl.load(scale + image * n + token, mask=inside, other=0) * ROUNDING
    far = tl.where(far <= near, 0.0, far)
    residual = tl.sqrt_rn(far)
    member = tl.load(labels + image * n + token, mask=inside, other=-1) == j
    size = tl.sum(tl.where(member, 1, 0), 0)
    middle = _median(residual, member, size)
    own = tl.sum(tl.where(token == tl.load(kept + image * k + j), residual, 0.0), 0)
    noise = middle * middle
    total = own * own + noise
    stays = tl.where(total > 0, tl.div_rn(noise, tl.where(total > 0, total, 1.0)), 1.0)
    stays = tl.minimum(tl.maximum(stays, low), high)
    tl.store(alpha + image * k + j, tl.where(size == 1, 1.0, stays))
