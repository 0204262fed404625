"""fastps.network.monitoring: what a node's agent observes of its edges, and what it tells other nodes and other processes.

Border: it opens no link and sends nothing. Arrows: it imports fastps.job, fastps.membership, fastps.system and fastps.tracing,
and no other module of fastps.network.
"""
