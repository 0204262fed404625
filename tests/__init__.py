"""Tests. Several run at a time, so each process computes with one thread: more would wait for each other's cores."""

import os

for _library in ("OMP", "OPENBLAS"):  # torch, and NumPy; before either is imported
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
