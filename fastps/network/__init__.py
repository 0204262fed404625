"""Several nodes: each node sends the sums of its workers' gradients to node 0, which sends the weights back.

Every node has a leaf arena, into which its workers push. Node 0 also has home arenas: ordinary stores whose workers are nodes,
so the same compiled scheduler decides between nodes. An agent process on each node serves the leaf arena, and is the only
process that sends or receives.

Border: links, messages and agents. It knows no discipline and no model; of torch it uses tensors and torch.distributed.
Arrows: it imports store, membership, job and system. torch/ and processes/ import it.
"""
