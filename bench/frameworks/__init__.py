"""fastps.bench.frameworks: what a step costs inside of other training frameworks, beside a loop of one's own.

Border: one file a framework, run by itself; no command imports it. Arrows: it imports fastps.integrations and what is below.
"""
