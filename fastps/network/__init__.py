"""Several nodes: each makes the versions of sums over all nodes, or node 0 makes them of the nodes' sums.

Every node has an arena, into which its workers push: a replica's or a leaf's. Node 0 also has home arenas: ordinary stores
whose workers are nodes, so the same compiled scheduler decides between nodes. They hold the weights, or the rows of
replicas. An agent process on each node serves its arena, and is the only process that sends or receives.

Border: links, messages and agents. It knows no discipline and no model; of torch it uses tensors and torch.distributed.
Arrows: it imports store, membership, job and system. torch/ and processes/ import it.
"""
