"""fastps.lab.papers: the papers' headline tables and figures, measured again; each file is one paper's rows.

A row has the paper's claim, its measurement here with the parameters of the paper's text, and the assumptions where the text
gives none. An item is a table, figure or claim of a paper; it holds if all its rows do. Border: a result that differs is shown
as not ok, with a note that says why; other settings that were tried are listed with their outcome. Arrows: it imports
fastps.job, fastps.simulation, fastps.advice and fastps.lab.demo.
"""

from fastps.lab.papers.items import Item, Outcome, outcomes
from fastps.lab.papers.row import Effort, Row, Verdict
from fastps.lab.papers.rows import ITEMS, ROWS, choose, reproduce

__all__ = ["ITEMS", "ROWS", "Effort", "Item", "Outcome", "Row", "Verdict", "choose", "outcomes", "reproduce"]
