"""A policy's values, checked one by one and together, and written as the scheduler's words."""

from libc.math cimport isfinite
from libc.stdint cimport int64_t

from fastps.kernels.scheduling.state cimport *

# The values that are names, and their numbers.
_NAMES = {
    "fold": {"each": FOLD_EACH, "all": FOLD_ALL, "quorum": FOLD_QUORUM, "count": FOLD_COUNT, "in-order": FOLD_IN_ORDER},
    "grant": {"at-once": GRANT_AT_ONCE, "next-version": GRANT_NEXT_VERSION, "bounded": GRANT_BOUNDED,
              "round-robin": GRANT_ROUND_ROBIN},
    "scale": {"one": SCALE_ONE, "mean": SCALE_MEAN, "linear": SCALE_LINEAR, "square-root": SCALE_SQUARE_ROOT,
              "divisor": SCALE_DIVISOR, "staleness": SCALE_STALENESS, "batch": SCALE_BATCH},
    "release": {"printed": RELEASE_PRINTED, "next-push": RELEASE_NEXT_PUSH},
    "bound": {"grant": BOUND_GRANT, "push": BOUND_PUSH},
    "credit": {"listed": CREDIT_LISTED, "prose": CREDIT_PROSE},
}
_DEFAULTS = {
    "release": "next-push", "bound": "grant", "hard_bound": False, "credit": "listed", "low": 0, "high": 0, "count": 0,
    "backups": 0, "timeout_ns": 0, "divisor": 0, "groups": 0, "relay": 0.0, "relax": 0.0, "reference": 0.0, "tune": False,
    "repeats": False, "combine": False,
}

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


def _unknown(what, name):
    return f"expected {what} to be one of {', '.join(_NAMES[what])}, found {name!r}"


def reason_against(str fold not None, str grant not None, str scale not None):
    """Why these values do not go together, as one sentence; None when they do.

    >>> reason_against("each", "next-version", "one")
    "fold 'each' cannot go with grant 'next-version': every push makes a version by itself, so there is none to wait for: use \
grant 'at-once'"
    >>> reason_against("count", "round-robin", "divisor") is None
    True
    """
    for what, name in (("fold", fold), ("grant", grant), ("scale", scale)):
        if name not in _NAMES[what]:
            return _unknown(what, name)
    if grant not in _SENSIBLE[fold]:
        return f"fold {fold!r} cannot go with grant {grant!r}: {_REASONS[fold]}"
    if fold in ("each", "in-order") and scale in _SUMS:
        return f"scale {scale!r} cannot go with fold {fold!r}: it is of pushes that are folded together; use 'one', " \
               "'staleness' or 'batch'"
    if fold not in ("each", "in-order") and (scale == "one" or scale == "batch" and fold != "all"):
        return f"scale {scale!r} cannot go with fold {fold!r}: pushes that are folded together need a mean; use one of " \
               f"{', '.join(_SUMS)} or 'staleness'"
    if scale == "divisor" and fold != "count":
        return "scale 'divisor' needs fold 'count', whose divisor it is"
    return None


cdef int policy_from_values(policy_t *policy, dict values, int64_t workers) except -1:
    """Check and write a policy's values; what is not given is 0, `release` is "next-push", and `scale` "one" or "mean"."""
    cdef dict given = {**_DEFAULTS, "scale": "one" if values["fold"] in ("each", "in-order") else "mean", **values}
    reason = reason_against(given["fold"], given["grant"], given["scale"])
    if reason is not None:
        raise ValueError(reason)
    for what, known in _NAMES.items():
        if given[what] not in known:
            raise ValueError(_unknown(what, given[what]))
        given[what] = known[given[what]]
    unknown = [name for name in values if name not in _NAMES and name not in _DEFAULTS]
    if unknown:
        raise TypeError(f"unknown values of a policy: {', '.join(unknown)}")
    if not given["hard_bound"]:
        given["bound"] = BOUND_NONE
    given["tune_batches"] = given["tune"]
    policy[0] = given
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
