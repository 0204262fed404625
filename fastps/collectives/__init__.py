"""fastps.collectives: the torch.distributed backend "fastps", whose ranks on one machine exchange tensors through shared memory.

Border: it has no optimizer and no store; its memory is no arena. Arrows: it imports fastps.membership.
"""
