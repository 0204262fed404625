"""fastps.cli: the command line: one file for each group of commands, and what they print.

Border: it holds no logic that a script would need. Arrows: it imports every other package; no package imports it.
"""
