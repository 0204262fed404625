"""The links that a discipline's transfers share: one for the server, one per leaf of a tree, or one per worker."""

from fastps.job.policy import Policy


def link_of(policy: Policy, rank: int, workers: int) -> int:
    """The number of the link that carries a worker's transfers.

    >>> from fastps.job.disciplines import BSP, RudraAdv, RudraAdvStar
    >>> [[link_of(policy, rank, 4) for rank in range(4)] for policy in (BSP(), RudraAdv(1), RudraAdvStar(1))]
    [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]]
    """
    if policy.overlap:
        return rank
    return rank * policy.groups // workers if policy.groups else 0
