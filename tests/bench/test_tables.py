"""fastps.bench.tables: the tables of docs/benchmarks.md are what the committed figures give."""

from pathlib import Path

import pytest

from fastps.bench import tables

DOCS = Path(__file__).parents[2] / "docs"


def _docs(folder: Path, page: str) -> Path:
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "step.json").write_text(
        '{"command": "c", "machine": "m", "measured": "t", "statistic": "s",'
        ' "columns": [{"key": "ratio", "heading": "ratio", "unit": "ratio"}], "rows": [{"ratio": 1.10}]}'
    )
    (folder / "benchmarks.md").write_text(page)
    return folder


@pytest.mark.skipif(not (DOCS / "benchmarks.md").exists(), reason="tests run without the source tree")
def test_the_page_is_what_the_figures_give() -> None:
    assert tables.main(["--check", "--docs", str(DOCS)]) == 0


@pytest.mark.skipif(not (DOCS / "benchmarks.md").exists(), reason="tests run without the source tree")
@pytest.mark.parametrize(
    ("column", "figures", "chosen"),
    [
        ("cnn", "training", {"model": "CNN", "workers": 4}),
        ("mlp", "training", {"model": "MLP", "workers": 4}),
        ("memory", "memory", {"optimizer": "SGD, momentum", "workers": 4}),
    ],
)
def test_the_table_beside_others_repeats_figures_of_other_tables(column: str, figures: str, chosen: dict[str, object]) -> None:
    of_file = tables.read_figures(DOCS / "benchmarks")
    (row,) = (row for row in of_file[figures]["rows"] if chosen.items() <= row.items())
    beside = {each["system"]: each[column] for each in of_file["beside"]["rows"]}
    systems = {"bsp": "fastps `bsp`", "dssp": "fastps `dssp:3,15`", "ddp": "DDP on Gloo", "hogwild": "Hogwild"}
    systems |= {"rpc": "torch's RPC, a parameter server", "ray": "Ray, a parameter server", "single": "one process, all cores"}
    repeated = {key: beside[system] for key, system in systems.items() if key in row}
    assert len(repeated) >= 3 and repeated == {key: row[key] for key in repeated}


def test_a_changed_page_is_told_of_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = _docs(tmp_path, "before\n<!-- table: step -->\n1.2\n<!-- end of table -->\nafter\n")
    assert tables.main(["--check", "--docs", str(docs)]) == 1
    assert "run `python -m fastps.bench.tables`" in capsys.readouterr().err
    assert tables.main(["--docs", str(docs)]) == 0
    assert "| 1.10 |" in (docs / "benchmarks.md").read_text()
    assert tables.main(["--check", "--docs", str(docs)]) == 0


def test_a_figure_without_a_table_is_refused(tmp_path: Path) -> None:
    assert tables.main(["--docs", str(_docs(tmp_path, "no table\n"))]) == 2
