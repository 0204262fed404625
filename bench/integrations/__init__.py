"""fastps.bench.integrations: what other training frameworks add to a step of fastps, one program a framework.

Border: each program runs by itself (python -m), because it needs its framework's extra. Arrows: as fastps.bench.
"""
