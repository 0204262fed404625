"""The node embeddings tell the karate club's factions, and the communities of a larger graph."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import example_programs


def _figures(folder: Path, *arguments: str, way: str = "alone") -> dict[str, Any]:
    file = folder / "figures.json"
    example_programs.run(way, "gnn_nodes.py", *arguments, "--json", str(file))
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


@pytest.mark.slow
def test_the_factions_of_the_karate_club_are_told(tmp_path: Path) -> None:
    figures = _figures(tmp_path, way="fastps run")
    assert figures["nodes"] == 34
    assert figures["right"] >= 30
    assert figures["modularity"] > 0.25, "random halves have 0"


@pytest.mark.slow
def test_the_communities_of_a_larger_graph_are_told(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "--graph", "planted", "--nodes", "400")
    assert figures["right"] > 0.7 * figures["nodes"], "a guess is right for a quarter"


@pytest.mark.slow
def test_gradients_of_the_touched_rows_alone_tell_the_factions_too(tmp_path: Path) -> None:
    assert _figures(tmp_path, "--sparse")["right"] >= 30
