"""A policy's values, checked one by one and together, and written as the scheduler's words."""

from libc.math cimport isfinite
from libc.stdint cimport int64_t
from libc.string cimport memset

from fastps.kernels.scheduling.state cimport *

_FOLDS = {"each": FOLD_EACH, "all": FOLD_ALL, "quorum": FOLD_QUORUM, "count": FOLD_COUNT, "in-order": FOLD_IN_ORDER}
_GRANTS = {"at-once": GRANT_AT_ONCE, "next-version": GRANT_NEXT_VERSION, "bounded": GRANT_BOUNDED,
           "round-robin": GRANT_ROUND_ROBIN}
_RELEASES = {"printed": RELEASE_PRINTED, "next-push": RELEASE_NEXT_PUSH}
_BOUNDS = {"grant": BOUND_GRANT, "push": BOUND_PUSH}
_CREDITS = {"listed": CREDIT_LISTED, "prose": CREDIT_PROSE}
_SCALES = {"one": SCALE_ONE, "mean": SCALE_MEAN, "linear": SCALE_LINEAR, "square-root": SCALE_SQUARE_ROOT,
           "divisor": SCALE_DIVISOR, "staleness": SCALE_STALENESS, "batch": SCALE_BATCH}

# Which folds go with which grants. What is missing makes no sense: `reason` says why.
_SENSIBLE = {
    "each": ("at-once", "bounded", "round-robin"),
    "all": ("next-version",),
    "quorum": ("next-version",),
    "count": ("at-once", "bounded", "round-robin", "next-version"),
    "in-order": ("round-robin",),
}
_REASONS = {
    "each": "every push makes a version by itself, so there is none to wait for: use grant 'at-once'",
    "all": "a sum of all workers needs workers that wait for it: use grant 'next-version'",
    "quorum": "pushes of one version need workers that wait for the next: use grant 'next-version'",
    "in-order": "pushes in a fixed order need grants in that order: use grant 'round-robin'",
}
_SUMS = ("mean", "linear", "square-root", "divisor")


def reason_against(str fold not None, str grant not None, str scale not None):
    """Why these values do not go together, as one sentence; None when they do.

    >>> reason_against("each", "next-version", "one")
    "fold 'each' cannot go with grant 'next-version': every push makes a version by itself, so there is none to wait for: use \
grant 'at-once'"
    >>> reason_against("count", "round-robin", "divisor") is None
    True
    """
    for what, name, known in (("fold", fold, _FOLDS), ("grant", grant, _GRANTS), ("scale", scale, _SCALES)):
        if name not in known:
            return f"expected {what} to be one of {', '.join(known)}, found {name!r}"
    if grant not in _SENSIBLE[fold]:
        return f"fold {fold!r} cannot go with grant {grant!r}: {_REASONS[fold]}"
    if fold in ("each", "in-order") and scale in _SUMS:
        return f"scale {scale!r} cannot go with fold {fold!r}: it is of pushes that are folded together; use 'one', " \
               "'staleness' or 'batch'"
    if fold not in ("each", "in-order") and scale in ("one", "batch"):
        return f"scale {scale!r} cannot go with fold {fold!r}: pushes that are folded together need a mean; use one of " \
               f"{', '.join(_SUMS)} or 'staleness'"
    if scale == "divisor" and fold != "count":
        return "scale 'divisor' needs fold 'count', whose divisor it is"
    return None


cdef int policy_from_values(policy_t *policy, dict values, int64_t workers) except -1:
    """Check and write a policy's values; what is not given is 0, `release` is "next-push", and `scale` "one" or "mean"."""
    cdef dict given = dict(values)
    memset(policy, 0, sizeof(policy_t))
    fold, grant = given.pop("fold"), given.pop("grant")
    scale = given.pop("scale", "one" if fold in ("each", "in-order") else "mean")
    reason = reason_against(fold, grant, scale)
    if reason is not None:
        raise ValueError(reason)
    cdef dict readings = {"release": (_RELEASES, "next-push"), "bound": (_BOUNDS, "grant"), "credit": (_CREDITS, "listed")}
    cdef dict chosen = {}
    for what, (known, default) in readings.items():
        name = given.pop(what, default)
        if name not in known:
            raise ValueError(f"expected {what} to be one of {', '.join(known)}, found {name!r}")
        chosen[what] = known[name]
    policy.fold, policy.grant, policy.scale = _FOLDS[fold], _GRANTS[grant], _SCALES[scale]
    policy.release, policy.credit = chosen["release"], chosen["credit"]
    policy.bound = chosen["bound"] if given.pop("hard_bound", False) else BOUND_NONE
    policy.low, policy.high = given.pop("low", 0), given.pop("high", 0)
    policy.count, policy.backups = given.pop("count", 0), given.pop("backups", 0)
    policy.timeout_ns = given.pop("timeout_ns", 0)
    policy.divisor = given.pop("divisor", 0)
    policy.groups = given.pop("groups", 0)
    policy.relay = given.pop("relay", 0.0)
    policy.relax = given.pop("relax", 0.0)
    policy.reference = given.pop("reference", 0.0)
    policy.tune_batches = given.pop("tune", False)
    policy.repeats = given.pop("repeats", False)
    policy.combine = given.pop("combine", False)
    if given:
        raise TypeError(f"unknown values of a policy: {', '.join(given)}")
    return policy_check(policy, workers)


cdef int policy_check(const policy_t *policy, int64_t workers) except -1:
    """Raise ValueError for words that are out of range: of a user's values, or of memory that another process wrote."""
    if not (FOLD_EACH <= policy.fold <= FOLD_IN_ORDER and GRANT_AT_ONCE <= policy.grant <= GRANT_ROUND_ROBIN
            and SCALE_ONE <= policy.scale <= SCALE_BATCH):
        raise ValueError(f"expected a fold, a grant and a scale by their numbers, found {policy.fold}, {policy.grant} and "
                         f"{policy.scale}")
    if policy.low < 0 or policy.high < policy.low:
        raise ValueError(f"expected bounds 0 <= low <= high, found low={policy.low}, high={policy.high}")
    if not (BOUND_NONE <= policy.bound <= BOUND_PUSH and CREDIT_LISTED <= policy.credit <= CREDIT_PROSE):
        raise ValueError(f"expected a bound and a credit by their numbers, found {policy.bound} and {policy.credit}")
    if policy.bound == BOUND_PUSH and policy.high < 1:
        raise ValueError("expected high of at least 1 with bound 'push': a push of the first worker leads by 1, found high=0")
    if policy.fold == FOLD_QUORUM and not (0 <= policy.count <= workers and 0 <= policy.backups < workers):
        raise ValueError(f"expected a count of 1 to {workers}, the number of workers, or 0 and fewer backups, found "
                         f"{policy.count} and {policy.backups}")
    if policy.fold == FOLD_COUNT and policy.divisor < 1:
        raise ValueError(f"expected a divisor of at least 1, found {policy.divisor}")
    if not 0 <= policy.groups <= workers or (policy.groups and policy.fold != FOLD_COUNT):
        raise ValueError(f"expected 0 to {workers} groups, and none unless the fold is 'count', found {policy.groups}")
    if policy.combine and policy.fold != FOLD_EACH:
        raise ValueError("expected combine with fold 'each' only: every other fold says by itself which pushes are one sum")
    if policy.repeats and policy.fold != FOLD_QUORUM:
        raise ValueError("expected repeats with fold 'quorum' only, which drops the pushes that are late")
    if policy.timeout_ns < 0:
        raise ValueError(f"expected a timeout of at least 0 ns, found {policy.timeout_ns}")
    if not (isfinite(policy.relay) and 0 <= policy.relay <= 1) or (policy.relay and policy.groups == 0):
        raise ValueError(f"expected a relay share of 0 to 1, and none without groups, found {policy.relay}")
    if not (isfinite(policy.relax) and 0 <= policy.relax <= 1):
        raise ValueError(f"expected a relaxation factor of 0 to 1, found {policy.relax}")
    if policy.scale == SCALE_SQUARE_ROOT and not (isfinite(policy.reference) and policy.reference > 0):
        raise ValueError(f"expected a reference batch of more than 0, found {policy.reference}")
    return 0
