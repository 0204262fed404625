"""The papers' headline tables and figures, measured again: a file a paper, each a table of rows.

A row says what the paper says, how it is measured here, with which parameters of the paper's text, and what is assumed where
the text gives none. Refuses to tune: what does not fit is shown as not ok, with a note that says why.
"""

from fastps.reproduce.row import Effort, Row, Verdict
from fastps.reproduce.rows import ROWS, choose, reproduce

__all__ = ["ROWS", "Effort", "Row", "Verdict", "choose", "reproduce"]
