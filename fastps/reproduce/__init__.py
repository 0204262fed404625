"""fastps.reproduce: the papers' headline tables and figures, measured again; each file is one paper's rows.

A row has the paper's claim, its measurement here with the parameters of the paper's text, and the assumptions where the text
gives none. Border: it tunes nothing; a result that differs is shown as not ok, with a note that says why. Arrows: it imports
fastps.job, fastps.simulation, fastps.advice and fastps.training.
"""

from fastps.reproduce.row import Effort, Row, Verdict
from fastps.reproduce.rows import ROWS, choose, reproduce

__all__ = ["ROWS", "Effort", "Row", "Verdict", "choose", "reproduce"]
