class Cores:
    count: float
    shared: bool
    n_workers: int
    slice_ns: int
    def __init__(self, count: float, workers: int, slice_ns: int) -> None: ...
