"""fastps.membership: the processes of a job: how they find the job, connect to each other, and detect a death.

Border: it knows connections and lanes, not gradients or weights. Arrows: it imports fastps.job and fastps.system.
"""
