"""fastps.kernels.rows: tables, of which a push carries rows: how rows are collected, laid out, and folded in place.

Arrows: it includes base and update.
"""
