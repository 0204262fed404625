"""fastps.collectives: the torch.distributed backend "fastps", for ranks that share the memory of one machine.

Border: it has no optimizer and no store; its memory is no arena. Arrows: it imports fastps.membership.
"""
