"""Worked out by hand from Rudra (Gupta et al.): n-softsync, hardsync, and the tree of parameter servers of Rudra-adv.

Learner l of lambda is the responsibility of leaf floor(l * groups / lambda). Names quote the sentence that decides.
"""

from tests.oracles.by_hand.events import Sequence, leave, push

# fmt: off
RUDRA = [
    Sequence("section 3.1: 'each learner calculates exactly one mini-batch'; 'then broadcasts the new weights to all learners'",
        "hardsync", 2, "hardsync:128", version=2, events=[
        push(1, 10, 0, [], []),
        push(0, 30, 0, [0, 1], [0, 1]),  # Equation (3): both gradients; both learners have weights 1
        push(0, 40, 1, [], []),
        push(1, 90, 1, [0, 1], [0, 1]),
    ]),
    Sequence("section 3.1: '1-softsync' of two sums two gradients of any learner, L_j in L_1, ..., L_lambda of equation (5)",
        "softsync", 2, "softsync:1", version=2, events=[
        push(0, 10, 0, [], [0]),
        push(0, 20, 0, [0, 0], [0]),  # c = floor(2 / 1) = 2, both of learner 0
        push(0, 30, 1, [], [0]),
        push(1, 40, 0, [0, 1], [1]),  # a staleness of 1
    ]),
    Sequence(
        "section 3.3: a leaf 'is responsible for averaging the gradients sent from its learners and relaying the averaged'",
        "tree", 4, "adv:1,groups=2", version=1, events=[
        push(0, 10, 0, [], [0]),  # leaf 0 has learners 0 and 1
        push(2, 20, 0, [], [2]),  # leaf 1 has learners 2 and 3
        push(1, 30, 0, [], [1]),  # leaf 0 relays: the root has 2 of c = 4
        push(3, 40, 0, [0, 1, 2, 3], [3]),  # leaf 1 relays: 4
    ]),
    Sequence("figure 2: 'gradients are pushed and aggregated upwards': what a leaf holds is not at the root, though it makes c",
        "tree", 4, "adv:2,groups=2", version=2, events=[
        push(0, 10, 0, [], [0]),
        push(2, 20, 0, [], [2]),  # c = floor(4 / 2) = 2 gradients are sent, one to each leaf
        push(3, 30, 0, [2, 3], [3]),  # leaf 1 relays two: an update
        push(1, 40, 0, [0, 1], [1]),  # leaf 0 relays two of version 0
    ]),
    Sequence("section 3.1: 'after collecting at least c': a leaf relays more than c at once, and the update takes all of them",
        "tree", 4, "adv:4,groups=2", version=2, events=[
        push(1, 10, 0, [], [1]),  # c = floor(4 / 4) = 1, but the gradient is still at the leaf
        push(0, 20, 0, [0, 1], [0]),  # two gradients reach the root: one update
        push(2, 30, 1, [], [2]),
        push(3, 40, 0, [2, 3], [3]),
    ]),
    Sequence("equation (5), 'L_j in L_1, ..., L_lambda': a leaf's sum may have two gradients of one learner",
        "tree", 4, "adv:1,groups=2", version=2, events=[
        push(0, 10, 0, [], [0]),
        push(0, 20, 0, [], [0]),  # leaf 0 relays two gradients, both of learner 0
        push(3, 30, 0, [], [3]),
        push(1, 40, 0, [], [1]),
        push(2, 50, 0, [0, 0, 2, 3], [2]),  # learner 1's gradient is still at leaf 0
        push(0, 60, 0, [], [0]),  # leaf 0 relays 1 and 0
        push(2, 70, 1, [], [2]),
        push(3, 80, 0, [0, 1, 2, 3], [3]),
    ]),
    Sequence("not in the paper, which does not say when: with relay=0.5 a leaf relays half of its learners' gradients",
        "tree", 6, "adv:1,groups=2,relay=0.5", version=1, events=[
        push(0, 10, 0, [], [0]),
        push(1, 20, 0, [], [1]),  # 2 of 3 are at least half: leaf 0 relays
        push(2, 30, 0, [], [2]),  # and begins anew
        push(3, 40, 0, [], [3]),
        push(4, 50, 0, [], [4]),  # leaf 1 relays: 4 of c = 6
        push(0, 60, 0, [0, 0, 1, 2, 3, 4], [0]),  # leaf 0 relays 2 and 0: 6, two of learner 0
        push(5, 70, 1, [], [5]),
    ]),
    Sequence("section 3.3: leaves need not have as many learners: of three, leaf 0 has 0 and 1, leaf 1 has 2",
        "tree", 3, "adv:1,groups=2", version=1, events=[
        push(2, 10, 0, [], [2]),  # leaf 1 relays at once
        push(2, 20, 0, [], [2]),  # and again: the root has 2 of c = 3
        push(0, 30, 0, [], [0]),
        push(1, 40, 0, [0, 1, 2, 2], [1]),  # two more: 4, which is "at least" 3
    ]),
    Sequence(
        "not in the paper, which has no leave: a leaver's gradient stays at its leaf, which then relays for those that live",
        "tree", 4, "adv:1,groups=2", version=1, events=[
        push(0, 10, 0, [], [0]),
        leave(1, 20, [], []),  # leaf 0 has one live learner and relays its gradient: 1 of c = 3
        push(2, 30, 0, [], [2]),
        push(3, 40, 0, [0, 2, 3], [3]),
    ]),
]
