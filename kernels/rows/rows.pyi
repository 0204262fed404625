MAX_TABLES: int
MAX_ROWS: int
RULES: dict[str, int]  # the number of each rule of kernels/rows/rows.h
PLANES: dict[int, tuple[int, int]]  # of each rule: its state tensors, and the words of a row in each; 0: the row's width
