"""fastps.cli: the command line: options, tables and reports, and in a folder of their own the commands.

Border: it holds no logic that a script would need. Arrows: it imports every other package; no package imports it.
"""
