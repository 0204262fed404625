"""The plain C loop over rows of a table that `fastps bench rows` compares a push with: no slot, no log, no lock."""

from libc.stdint cimport int64_t


def update_rows(float[:, ::1] table not None, const int64_t[::1] numbers not None, const float[:, ::1] values not None,
                double learning_rate):
    """Subtract the learning rate times each row of values from the numbered row of the table. Releases the GIL.

    Raises ValueError for other shapes, IndexError for a number that is no row.
    """
    cdef int64_t i, j, row, width = table.shape[1]
    cdef float rate = <float> learning_rate
    cdef bint outside = False
    if values.shape[0] != numbers.shape[0] or values.shape[1] != width:
        raise ValueError(f"expected {numbers.shape[0]} rows of {width} values, found {values.shape[0]} of {values.shape[1]}")
    with nogil:
        for i in range(numbers.shape[0]):
            row = numbers[i]
            if not 0 <= row < table.shape[0]:
                outside = True
                break
            for j in range(width):
                table[row, j] -= rate * values[i, j]
    if outside:
        raise IndexError(f"expected rows 0 to {table.shape[0] - 1}, found {row}")
