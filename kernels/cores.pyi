class Cores:
    count: float
    rivals: float
    shared: bool
    n_workers: int
    def __init__(self, count: float, workers: int, rivals: float = 0.0) -> None: ...
    def busy_ns(self) -> int: ...
