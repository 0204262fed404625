"""fastps.membership: which processes are in a job: how they find it, connect to each other, and notice a death.

Border: it knows connections and lanes, not gradients or weights. Arrows: it imports fastps.job and fastps.system.
"""
