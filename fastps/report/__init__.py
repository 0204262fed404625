"""fastps.report: one HTML page about a run that opens offline.

Border: it turns traces and results into plots, and computes no figure that another room can give. Arrows: it imports
fastps.advice, fastps.tracing and what is below them.
"""
