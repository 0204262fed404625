"""The arena plan of a layout: the arena's header and size, and what to change where it does not fit."""

from bisect import bisect_left
from dataclasses import replace

from fastps.errors import LayoutError, UsageError
from fastps.job import limits
from fastps.job.layout import GRADIENT_NUMBERS, Layout
from fastps.job.policy import Policy
from fastps.kernels.shm import plan as arena_plan
from fastps.kernels.shm.arena import MAX_BUFFERS

_AT_ONCE = 2  # weights buffers with pages when an optimizer in Python begins: the published one, and the one that is written


def most_lanes(policy: Policy) -> int:
    """The most workers of an arena. Each has one buffer of weights or three, and three are for all."""
    return (MAX_BUFFERS - 3) // (3 if policy.overlap else 1)


def check_lanes(policy: Policy, lanes: int) -> None:
    """Raise LayoutError for a number of workers that no arena of this discipline has."""
    if not 1 <= lanes <= (most := most_lanes(policy)):
        raise LayoutError(f"expected 1 to {most} workers (and max_workers=) in this job, found {lanes}")


def plan(layout: Layout) -> tuple[bytes, int, list[tuple[int, int]]]:
    """The header of a layout's arena, the arena's size in bytes, and the ranges that the job needs from the beginning.

    The rest gets pages later: the readers' buffers when a reader comes, the rows of pushes when a worker needs them, frozen
    parameters with their first gradient, and weights buffers beside the lowest two when an optimizer in Python writes them.
    A range is (offset, length).
    Raises UsageError for a layout without parameters, and LayoutError for a number of workers out of range.
    """
    if not layout.parameters and not layout.carried:
        raise UsageError("expected at least one parameter, found none")
    check_lanes(layout.policy, layout.lanes)
    # A reader needs a number of a buffer. Weights on devices have neither buffers in the arena nor readers.
    readers = 0 if layout.owner_lanes else max(0, min(layout.max_readers, MAX_BUFFERS - layout.buffers))
    return arena_plan.plan(
        lanes=layout.lanes,
        slots=layout.slots,
        ring_size=limits.RING_SIZE,
        groups=layout.groups,
        parameters=len(layout.parameters),
        buffer_floats=0 if layout.owner_lanes else layout.buffer_floats,
        rule=layout.rule.number,
        state_planes=layout.planes,
        extra_bytes=layout.momentum_begin + 4 * layout.buffer_floats if layout.rule.in_workers else layout.extra_bytes,
        buffers=layout.buffers,
        shards=len(layout.shards),
        ema_decay=layout.policy.ema,
        checks_finite=layout.faults.nonfinite != "allow",
        gradient_type=GRADIENT_NUMBERS[layout.gradient_type],
        shown_type=GRADIENT_NUMBERS[layout.shown_type],
        servers=int(layout.has_server),
        readers=readers,
        tables=layout.tables,
        row_rule=layout.row_rule,
        frozen=layout.frozen_runs,
        carried_bytes=layout.carried_bytes,
        later=layout.buffers - _AT_ONCE if layout.rule.runs_in_python else 0,
    )


def remedy(layout: Layout, free: int) -> str:
    """What to change so that the arena of this layout fits into `free` bytes, as the end of an error."""
    alone = replace(layout, faults=replace(layout.faults, max_workers=0))

    def needs(other: Layout) -> int:
        return sum(length for _, length in plan(other)[2])

    most = bisect_left(range(1, layout.lanes), True, key=lambda lanes: needs(replace(alone, workers=lanes)) > free)
    fewer = [f"at most {most} {layout.lanes_are}"] if most else []
    is_of_nodes = layout.has_agent or layout.lanes_are == "nodes"  # they push float32 alone
    is_wide = layout.gradient_type == "float32" and not (is_of_nodes or layout.tables)
    if is_wide and needs(replace(layout, gradient_type="float16")) <= free:
        fewer.append("gradients in half precision (push_dtype=torch.bfloat16)")
    return f"use {', '.join([*fewer, 'a smaller model'])}, or raise the limit"
