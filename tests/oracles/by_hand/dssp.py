"""Worked out by hand from DSSP's Algorithms 1 and 2 and its text: bsp, asp, ssp, and each reading of dssp.

t is (pushes of worker 0, pushes of worker 1, ...) after the event. Times are those of Algorithm 2, table A. Every push is
folded when it comes (line 2), unless the sequence is of bsp.
"""

from tests.oracles.by_hand.events import Event, Sequence, push


def ok(worker: int, now_ns: int, granted: list[int]) -> Event:
    """A push that is folded at once, and the workers that get OK."""
    return push(worker, now_ns, 0, [worker], granted)


# Figure 2 with numbers: steps of 10 and 41. The bound of s_L = 2 is exceeded for the first time at 52.
# fmt: off
_FIGURE_2 = [
    ok(1, 1, [1]),  # t = (0, 1)
    ok(0, 12, [0]),  # t = (1, 1)
    ok(0, 22, [0]),
    ok(0, 32, [0]),  # t = (3, 1): a gap of 2 <= s_L, line 8
    ok(1, 42, [1]),  # t = (3, 2)
    ok(0, 42, [0]),  # t = (4, 2)
    # t = (5, 2), a gap of 3. Lines 4 and 5: I_0 = 52 - 42 = 10, I_1 = 42 - 1 = 41. Line 6: Sim_0 = 52, 62, 72, 82, 92.
    # Line 7: Sim_1[0] = 42 + 41 = 83, then 124, 165, ... Line 8: |83 - 82| = 1 is the least, so r* = 3.
    ok(0, 52, [0]),
    ok(0, 62, [0]),
    ok(0, 72, [0]),  # t = (7, 2)
]

DSSP = [
    Sequence(
        "section I.A.1: 'once the [...] server receives gradients from all workers [...] it sends the latest [...] weights'",
        "bsp", 2, "bsp", version=2, events=[
        push(0, 1, 0, [], []), push(1, 2, 0, [0, 1], [0, 1]), push(1, 3, 1, [], []), push(0, 4, 1, [0, 1], [0, 1]),
    ]),
    Sequence("section I.A.2: 'no synchronization is required. Workers do not wait for each other'",
        "asp", 2, "asp", version=5, events=[
        ok(0, 1, [0]), ok(0, 2, [0]), ok(0, 3, [0]), ok(0, 4, [0]), ok(1, 5, [1]),
    ]),
    Sequence("line 8: 'if (t_p - t_slowest <= s_L) then send OK', so that the push after it leads by s + 1",
        "ssp", 2, "ssp:1", version=5, events=[
        ok(0, 1, [0]),  # t = (1, 0): a gap of 1 <= 1
        ok(0, 2, []),  # t = (2, 0)
        ok(1, 3, [0, 1]),  # t = (2, 1), line 17
        ok(0, 4, []),  # t = (3, 1)
        ok(1, 5, [0, 1]),  # t = (3, 2)
    ]),
    # R2SP's figure 4a: worker-1, our 0, pushes u_k first and u_(k+1) last of the three, and has then missed 2(N - 1) = 4.
    # The figure stops at k + 1. Its own rule, "can proceed to the (k+1)th iteration only when the other two workers have
    # already entered the kth", lets the other two go on to k + 2: the worst case of this listing, whose bound is on grants,
    # is 3(N - 1) = 6 missed updates.
    Sequence("line 2 makes a version of each push: the worst case of s = 1 has missed 3(N - 1) = 6",
        "ssp", 3, "ssp:1", version=8, events=[
        ok(0, 1, [0]),  # it reads version 1
        ok(1, 2, [1]), ok(2, 2, [2]), ok(1, 3, [1]), ok(2, 3, [2]),  # 4 missed
        ok(1, 4, []), ok(2, 4, []),  # 6; a gap of 2: both wait now
        ok(0, 5, [0, 1, 2]),
    ]),
    Sequence(
        "section I.A.3: 'synchronization is forced on fastest workers which are s iterations ahead', s = 1, so no lead of 2",
        "dssp", 2, "dssp:1,1,bound=push", version=4, events=[
        ok(0, 1, []),  # t = (1, 0): 1 ahead
        ok(1, 2, [0, 1]),  # t = (1, 1)
        ok(1, 3, []),  # t = (1, 2)
        ok(0, 4, [0, 1]),  # t = (2, 2)
    ]),
    Sequence("lines 12 to 14 as listed: r_p <- r*, and OK without taking from it, so 4 iterations for r* = 3",
        "dssp", 2, "dssp:2,6", version=12, events=[
        *_FIGURE_2,  # r_0 = 3, 2, 1 after the pushes at 52, 62 and 72
        ok(0, 82, [0]),  # line 3: r_0 = 1 > 0; line 4: r_0 = 0
        ok(1, 83, [1]),  # t = (8, 3)
        # t = (9, 3). Sim_0 = 92, 102, 112, 122, 132; Sim_1 = 124, 165, ...: |124 - 122| = 2, so r* = 3.
        ok(0, 92, [0]),
    ]),
    Sequence("Figure 2: 'DSSP allows worker 1 to run 3 more iterations and stop at the green solid line'",
        "dssp", 2, "dssp:2,6,credit=prose", version=11, events=[
        *_FIGURE_2,  # the iterations that begin at 52, 62 and 72 are the 3
        # t = (8, 2). Sim_0 = 82, 92, ..., 122; Sim_1 = 83, 124, ...: |83 - 82| = 1, and |124 - 122| = 2; so r* = 0.
        ok(0, 82, []),
        ok(1, 83, [0, 1]),  # the dashed line: 'the end of waiting when the slowest worker completes its running iteration'
    ]),
    Sequence(
        "line 17 to the letter: 'wait until the slowest worker sends the next push request(s) so that t_p - t_slowest <= s_L'",
        "dssp", 2, "dssp:2,6,release=printed,credit=prose", version=14, events=[
        *_FIGURE_2,
        ok(0, 82, []),
        ok(1, 83, [1]),  # t = (8, 3), a gap of 5
        ok(1, 124, [1]),
        ok(1, 165, [1]),  # t = (8, 5), a gap of 3
        ok(1, 206, [0, 1]),  # t = (8, 6), a gap of 2
    ]),
    Sequence("section III.A: 's* in [s_L, s_U]': with bound=push no worker is more than 6 ahead",
        "dssp", 2, "dssp:2,6,bound=push", version=13, events=[
        *_FIGURE_2,  # at 52 a gap of 3: 3 more pushes would make it 6, so 3 iterations
        ok(0, 82, []),  # t = (8, 2), a gap of 6
        ok(1, 83, [0, 1]),  # t = (8, 3), a gap of 5
        ok(0, 92, []),  # t = (9, 3), a gap of 6, where the listing gives r* = 3
        ok(1, 124, [0, 1]),
    ]),
    Sequence("hard_bound grants while the gap is s_U = 6 at most, so that a push leads by 7",
        "dssp", 2, "dssp:2,6,hard_bound=true", version=13, events=[
        *_FIGURE_2,  # r_0 = 3 at a gap of 3
        ok(0, 82, [0]),  # t = (8, 2), a gap of 6: the last of the 3
        ok(0, 92, []),  # t = (9, 2), a gap of 7
        ok(1, 93, [0, 1]),  # t = (9, 3), a gap of 6
        ok(0, 102, []),  # t = (10, 3), a gap of 7
    ]),
    Sequence("section III.C: 'if 0 is returned, [...] the worker should wait for the slowest worker at the current iteration'",
        "dssp", 2, "dssp:1,3", version=7, events=[
        ok(1, 10, [1]),
        ok(0, 11, [0]),
        ok(0, 16, [0]),
        ok(1, 20, [1]),  # t = (2, 2)
        ok(0, 21, [0]),  # t = (3, 2)
        # t = (4, 2). Sim_0 = 29, 37, 45; Sim_1 = 30, 40, 50: |30 - 29| = 1 < |40 - 37| = 3 < |50 - 45| = 5.
        ok(0, 29, []),
        ok(1, 30, [0, 1]),
    ]),
    Sequence(
        "section III.C: 'even if worker p is not the fastest [...], as long as its r_p > 0 [...], it can still perform extra"
        " iterations'; line 11: without credit only the fastest asks the controller",
        "dssp", 3, "dssp:1,4", version=18, events=[
        ok(2, 1, [2]),
        ok(1, 5, [1]),
        ok(0, 10, [0]),
        ok(0, 20, [0]),
        ok(1, 21, [1]),
        ok(2, 31, [2]),  # t = (2, 2, 2)
        ok(0, 32, [0]),
        ok(1, 33, [1]),  # t = (3, 3, 2)
        # t = (4, 3, 2): I_0 = 10, I_2 = 30. Sim_0 = 42, 52, 62, 72; Sim_2 = 61, 91, 121, 151: |62 - 61|, so r_0 = 2.
        ok(0, 42, [0]),
        # t = (4, 4, 2): as fast as worker 0. Sim_1 = 43, 53, 63, 73: |63 - 61|, so r_1 = 2.
        ok(1, 43, [1]),
        ok(1, 53, [1]),  # r_1 = 1
        ok(1, 55, [1]),  # r_1 = 0; t = (4, 6, 2)
        ok(0, 56, [0]),  # t = (5, 6, 2): not the fastest, and r_0 = 2 > 0
        ok(0, 57, [0]),  # t = (6, 6, 2): r_0 = 0
        # t = (6, 7, 2): I_1 = 3. Sim_1 = 58, 61, 64, 67: |61 - 61| = 0, so r_1 = 1.
        ok(1, 58, [1]),
        ok(1, 59, [1]),  # t = (6, 8, 2), r_1 = 0
        ok(0, 60, []),  # t = (7, 8, 2): r_0 = 0, a gap of 5, and not the fastest
        ok(2, 61, [0, 2]),
    ]),
]
