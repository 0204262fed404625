"""Links of transfers: one server's, one for each leaf of a tree, or one for each worker."""

import pytest

from fastps.job.links import link_of
from fastps.job.specs import parse_policy


@pytest.mark.parametrize(
    ("spec", "links"), [("bsp", [0, 0, 0, 0]), ("adv:1", [0, 0, 1, 1]), ("adv*:1", [0, 1, 2, 3])], ids=["server", "tree", "own"]
)
def test_workers_share_the_links_of_their_discipline(spec: str, links: list[int]) -> None:
    assert [link_of(parse_policy(spec), rank, 4) for rank in range(4)] == links
