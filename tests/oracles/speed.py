"""A worker's time as a function of its batch: R2SP (Chen, Wang and Li), sections IV and V, and bsp with batches by speed."""


class Speed:
    """The sums of 1, b, t, bb, bt over a worker's samples (batch b, time t), each with the weight that it has in the EMA."""

    def __init__(self) -> None:
        self.sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, samples: int, sample_ns: int) -> None:
        """One more iteration."""
        b, t = float(samples), float(sample_ns)
        n, sum_b, sum_t, sum_bb, sum_bt = (7 / 8 * total for total in self.sums)
        self.sums = (n + 1, sum_b + b, sum_t + t, sum_bb + b * b, sum_bt + b * t)

    def line(self) -> tuple[float, float] | None:
        """Section IV, "the linear relationship between a worker's batch size and its iteration time": (a, k).

        time = a + k * batch by weighted least squares; k alone if the batches are too equal for a line, or it is impossible
        (k <= 0, a < 0). None without a sample, or without a time in it.
        """
        n, sum_b, sum_t, sum_bb, sum_bt = self.sums
        if sum_b == 0 or sum_t == 0:
            return None
        denominator = n * sum_bb - sum_b * sum_b
        if 1000 * denominator > n * sum_bb:
            k = (n * sum_bt - sum_b * sum_t) / denominator
            a = (sum_t - k * sum_b) / n
            if k > 0 and a >= 0:
                return a, k
        return 0.0, sum_t / sum_b
