"""The links that a discipline's transfers share: one server's, one of each leaf of a tree, or each worker's own."""

from fastps.job.policy import Policy


def link_of(policy: Policy, rank: int, workers: int) -> int:
    """Which link a worker's transfers go over.

    >>> from fastps.job.disciplines import BSP, RudraAdv, RudraAdvStar
    >>> [[link_of(policy, rank, 4) for rank in range(4)] for policy in (BSP(), RudraAdv(1), RudraAdvStar(1))]
    [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]]
    """
    if policy.overlap:
        return rank
    return rank * policy.groups // workers if policy.groups else 0
