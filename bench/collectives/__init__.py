"""fastps.bench.collectives: the process group "fastps" beside other backends of torch.distributed.

Border: it measures no store. Arrows: it imports fastps.bench's method and fastps.collectives.
"""

from fastps.bench.collectives.sides import measure as measure
