"""The node embeddings tell the karate club's factions, and the communities of a larger graph."""

import pytest

from tests.support.example_programs import figures as figures_of


@pytest.mark.slow
def test_the_factions_of_the_karate_club_are_told() -> None:
    figures, _ = figures_of("fastps run", "gnn_nodes.py")
    assert figures["nodes"] == 34
    assert figures["right"] >= 30
    assert figures["modularity"] > 0.25, "random halves have 0"


@pytest.mark.slow
def test_the_communities_of_a_larger_graph_are_told() -> None:
    figures, _ = figures_of("alone", "gnn_nodes.py", "--graph", "planted", "--nodes", "400")
    assert figures["right"] > 0.7 * figures["nodes"], "a guess is right for a quarter"


@pytest.mark.slow
def test_gradients_of_the_touched_rows_alone_tell_the_factions_too() -> None:
    figures, _ = figures_of("alone", "gnn_nodes.py", "--sparse")
    assert figures["right"] >= 30
