"""Time of a matrix product of any shape, read from those that were measured.

Two kinds of tables:

- a grid over (n, k): blended linearly in n and in k, since time is nearly linear in both once the GPU is
  full. Beyond the last node it keeps that node's share of the roofline.
- curves of a few shapes: the share of the roofline is blended by the number of weights, n * k. Beyond the
  largest it stays; below the smallest, what launching and filling the GPU costs does not shrink.

The roofline is the larger of bytes (weights, input, output, 16-bit) over bandwidth and operations over peak.
"""

from __future__ import annotations

from bisect import bisect_right

from harness.profiles.gpu import GemmCurve, GemmGrid, Gpu, GpuSpec

DTYPE_BYTES = 2
# What of the smallest measured product is launch and ramp: from the 16.8M and 25.2M weight products of
# the RTX PRO 6000 at one token (25.6 and 35.8 us), whose straight line meets zero weights at 5 us.
RAMP_US = 4.0


def gemm_bytes(n: int, k: int, m: float) -> float:
    """Bytes that a product of m tokens with n x k weights moves at least."""
    return DTYPE_BYTES * (n * k + m * (n + k))


def gemm_flops(n: int, k: int, m: float) -> float:
    """Operations of a product of m tokens with n x k weights."""
    return 2.0 * m * n * k


def roofline_us(spec: GpuSpec, n: int, k: int, m: float) -> float:
    """The least that the sheet allows, us."""
    return max(gemm_bytes(n, k, m) / (spec.bandwidth_gb_s * 1e3), gemm_flops(n, k, m) / (spec.tflops * 1e6))


class GemmTimes:
    """Reads the products of one GPU.

    Attributes:
        m: token counts at which the tables have nodes; time is linear between them.
        m_head: the same for products run once a request (the output head).
    """

    def __init__(self, gpu: Gpu) -> None:
        self._spec = gpu.spec
        self._grid = gpu.numbers.gemm_grid
        self._curves = sorted(gpu.numbers.gemm_curves, key=lambda c: (c.n * c.k, c.n))
        if self._grid is not None:
            self._cells = _filled(self._grid, gpu.spec)
            self.m = self.m_head = tuple(self._grid.m)
        else:
            self.m = tuple(max(self._curves, key=lambda c: c.m[-1]).m)
            self.m_head = tuple(self._curves[-1].m)

    def beyond(self, n: int, k: int) -> str | None:
        """What is not covered by measurements for this shape, or None."""
        if self._grid is not None:
            over = [f"{what} > {axis[-1]}" for what, x, axis in self._sides(n, k) if x > axis[-1]]
            return f"above the measured sizes ({', '.join(over)})" if over else None
        if any((c.n, c.k) == (n, k) for c in self._curves):
            return None
        return "by the roofline share of other shapes"

    def us(self, n: int, k: int, m: int) -> float:
        """Time of m tokens through n x k weights, us; m is linear between nodes."""
        if self._grid is not None:
            return self._from_grid(self._grid, n, k, m)
        return self._from_curves(n, k, m)

    def _sides(self, n: int, k: int) -> tuple[tuple[str, int, list[int]], tuple[str, int, list[int]]]:
        assert self._grid is not None
        return ("n", n, self._grid.n), ("k", k, self._grid.k)

    def _from_grid(self, grid: GemmGrid, n: int, k: int, m: int) -> float:
        inside_n, inside_k = min(n, grid.n[-1]), min(k, grid.k[-1])
        a, u = _place(grid.n, inside_n)
        b, v = _place(grid.k, inside_k)
        us = 0.0
        for i, wi in ((a, 1.0 - u), (a + 1, u)):
            for j, wj in ((b, 1.0 - v), (b + 1, v)):
                if wi and wj:
                    us += wi * wj * _at(grid.m, self._cells[i][j], m)
        if (n, k) != (inside_n, inside_k):
            us *= roofline_us(self._spec, n, k, m) / roofline_us(self._spec, inside_n, inside_k, m)
        return us

    def _from_curves(self, n: int, k: int, m: int) -> float:
        able = [c for c in self._curves if m <= c.m[-1]] or [max(self._curves, key=lambda c: c.m[-1])]
        for curve in able:
            if (curve.n, curve.k) == (n, k):
                return _at(curve.m, curve.us, m)
        weights = n * k
        roof = roofline_us(self._spec, n, k, m)
        above = bisect_right([c.n * c.k for c in able], weights)
        if above == 0:
            part = weights / (able[0].n * able[0].k)
            return max(roof / self._share(able[0], m), roof) + RAMP_US * (1.0 - part)
        low, high = able[above - 1], able[min(above, len(able) - 1)]
        share = self._share(low, m)
        if high is not low:
            span = high.n * high.k - low.n * low.k
            share += (weights - low.n * low.k) / span * (self._share(high, m) - share)
        return roof / share

    def _share(self, curve: GemmCurve, m: int) -> float:
        return roofline_us(self._spec, curve.n, curve.k, m) / _at(curve.m, curve.us, m)


def _filled(grid: GemmGrid, spec: GpuSpec) -> list[list[list[float]]]:
    """Cells without a measurement, in the order n, k, m, at the roofline share of the next smaller n."""
    cells: list[list[list[float]]] = []
    flat = iter(grid.us)
    for i, n in enumerate(grid.n):
        row = []
        for j, k in enumerate(grid.k):
            us = [next(flat) for _ in grid.m]
            if i and None in us:
                below = cells[i - 1][j]
                us = [
                    x or below[t] * roofline_us(spec, n, k, m) / roofline_us(spec, grid.n[i - 1], k, m)
                    for t, (x, m) in enumerate(zip(us, grid.m, strict=True))
                ]
            row.append([float(x or 0.0) for x in us])
        cells.append(row)
    return cells


def _place(axis: list[int], x: float) -> tuple[int, float]:
    """Segment of x and the share of the way along it; flat below the first node."""
    if x <= axis[0]:
        return 0, 0.0
    i = min(bisect_right(axis, x) - 1, len(axis) - 2)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


def _at(axis: list[int], us: list[float], x: float) -> float:
    """Linear between nodes, flat below the first, in proportion above the last."""
    if x >= axis[-1]:
        return us[-1] * (x / axis[-1])
    i, u = _place(axis, x)
    return us[i] + u * (us[i + 1] - us[i])
