"""Rows of "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning" (Zhao, An, Liu and Chen): DSSP.

Numbers come from the paper's text, or are named as assumed.
"""

from fastps.lab.papers.dssp_learning import LEARNING_ROWS
from fastps.lab.papers.dssp_speed import SPEED_ROWS
from fastps.lab.papers.dssp_theory import THEORY_ROWS
from fastps.lab.papers.items import Item

PAPER = "dssp"
ITEMS = (
    Item(
        name="Abstract",
        says="DSSP adapts the threshold to reduce the waiting of faster workers. On like GPUs it is more stable and slightly"
        " better than SSP and ASP.",
        left_out="'more stable and slightly better': no measure is given, and with like GPUs all three make nearly the same run"
        " here (Figure 3a's row)",
    ),
    Item(name="Figure 1", says="What an iteration interval is.", left_out="all: a drawing"),
    Item(name="Section III.A, range", says="DSSP finds a threshold within [s_L, s_U]: no worker is further ahead than s_U."),
    Item(name="Section III.A, least wait", says="The threshold that it finds has the least wait of all in the range."),
    Item(
        name="Algorithms 1 and 2",
        says="Read to the letter, they are what Table I and Figure 2 show: ASP's speed, and r* further iterations.",
    ),
    Item(name="Figure 2", says="r* = 3 of R = [0, 4] gives the least wait; the fastest worker runs 3 more iterations."),
    Item(name="Theorem 1", says="SGD under SSP has a regret of at most 4 F L sqrt(2 (s + 1) P T)."),
    Item(name="Theorem 2", says="The same for DSSP with s_L + r in place of s, r the largest of R."),
    Item(
        name="Section V.B.1",
        says="Iteration throughput with fully connected layers: ASP, then DSSP and SSP, then BSP; SSP with a large s is much"
        " faster than DSSP.",
    ),
    Item(
        name="Figure 3a",
        says="Downsized AlexNet: ASP, SSP and DSSP converge sooner than BSP; ASP ends lowest, DSSP between SSP and BSP.",
        left_out="the curves over 300 epochs: they need CIFAR-10 and a GPU",
    ),
    Item(
        name="Figure 3b",
        says="Downsized AlexNet: DSSP ends higher than all SSPs but one.",
        left_out="10 of the 13 thresholds, and the curves",
    ),
    Item(name="Section V.B.2", says="Iteration throughput without fully connected layers: BSP, then SSP, DSSP and ASP."),
    Item(
        name="Figures 3c to 3f",
        says="ResNet-50 and ResNet-110: DSSP ends a bit higher than the average SSP, and BSP lowest.",
        left_out="all: CIFAR-100 and deep networks, for which section V.C says that stale updates act as noise, need a GPU",
    ),
    Item(name="Section V.D", says="ASP has the most stale updates of all; those of SSP are staler the larger s is."),
    Item(name="Figure 4", says="ResNet-110 on two unlike cards: DSSP converges sooner than SSP and to a higher accuracy."),
    Item(
        name="Table I",
        says="Seconds to accuracies of 0.67 and 0.68 on two unlike cards: DSSP like ASP, half of SSP's and BSP's.",
    ),
    Item(
        name="Section VI",
        says="DSSP ensures convergence by limiting the delays, and on unlike cards it is much faster than SSP.",
    ),
)
ROWS = (*SPEED_ROWS, *THEORY_ROWS, *LEARNING_ROWS)
