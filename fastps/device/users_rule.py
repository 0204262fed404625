"""The kernels of a job on a device: compiled before a worker attaches. A user's rule is compared with its Python function."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastps.device.cuda import CudaDevice
from fastps.errors import UnsupportedError, UsageError
from fastps.job.layout import Layout
from fastps.job.update_rules import Hyper
from fastps.job.user_rules import UserRule
from fastps.kernels.cuda import launch_args
from fastps.kernels.update import fold

Floats = npt.NDArray[np.float32]

_VALUES = 96
_STEPS = (0, 4)  # applications before the one that is compared
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6  # functions such as expf differ in their last digits between compilers


def prepare(device: CudaDevice, layout: Layout, hypers: Sequence[Hyper]) -> None:
    """Compile what folds of a job run on a device, before anybody waits for them; a user's rule is compared with its function.

    Raises UnsupportedError for a user's rule without cuda=, or one that reads sums; UsageError if cuda= computes something else
    than the Python function; DeviceError if a kernel does not compile.
    """
    rule, dtype = layout.rule, layout.gradient_type
    device.prepare(launch_args.check_kernel(dtype), launch_args.COPY_KERNEL)
    if layout.shown_type != "float32":
        device.prepare(launch_args.fold_kernel(fold.RULE_SGD, dtype))  # writes halves alone
    if rule.number in launch_args.RULE_NAMES:
        device.prepare(launch_args.fold_kernel(rule.number, dtype))
        return
    if rule.number == fold.RULE_SUMMING:
        raise UnsupportedError(
            f"rule {rule.name!r} reads sums over whole parameters, which no kernel adds up: use FASTPS_PLACEMENT=host"
        )
    if not isinstance(rule, UserRule) or not rule.cuda:
        raise UnsupportedError(
            f"expected rule {rule.name!r} in C, too, where shards are on a GPU, found no cuda=: see fastps.rule, or use"
            " FASTPS_PLACEMENT=host"
        )
    device.prepare(launch_args.fold_kernel(rule.number, dtype), users=rule.device_text())
    for hyper in hypers:
        for steps in _STEPS:
            _compare(device, rule, hyper, steps)


def _compare(device: CudaDevice, rule: UserRule, hyper: Hyper, steps: int) -> None:
    """Apply the rule once on the device and once on the CPU. Raises UsageError unless the results agree."""
    random, planes = np.random.default_rng(steps), len(rule.planes)
    weights, gradient = random.standard_normal((2, _VALUES)).astype(np.float32)
    state = random.standard_normal((planes, _VALUES)).astype(np.float32) ** 2
    weights[:6], gradient[2:10] = 0, 0
    if not steps:
        for plane in range(planes):
            state[plane] = rule.initial_value(plane)
    counts = np.full(1, steps, np.int64)
    pushes = [(gradient, [tuple(hyper)], [True], 1.0, 1.0)]
    expected = fold.fold(rule.number, fold.FOLD_SUM, [(0, _VALUES, 0)], pushes, weights, state, counts, user_rule=rule.address)
    found = _folded(device, rule, hyper, weights, gradient, state, counts)
    names = ("weight", *rule.planes)
    for name, one, other in zip(names, (found[0], *found[1:]), (expected[0], *expected[1]), strict=True):
        near = np.isclose(one, other, _RELATIVE, _ABSOLUTE, equal_nan=True)
        if not near.all():
            at = int(np.flatnonzero(~near)[0])
            raise UsageError(
                f"rule {rule.name!r}: expected cuda= to compute what the Python function does, found {name} {one[at]} instead"
                f" of {other[at]} from weight {weights[at]} and gradient {gradient[at]}"
            )


def _folded(
    device: CudaDevice,
    rule: UserRule,
    hyper: Hyper,
    weights: Floats,
    gradient: Floats,
    state: Floats,
    counts: npt.NDArray[np.int64],
) -> Floats:
    """The new weights, then the new state, by the device's kernel: float32[1 + planes, values]."""
    planes, size = len(rule.planes), 4 * _VALUES
    shape = launch_args.Shape(rule.number, planes, 0.0, ((0, _VALUES, 0),))
    stream, outputs = device.make_stream(), (1 + planes) * size
    inputs = np.concatenate([weights, state.reshape(-1), gradient]).view(np.uint8)
    staged = np.concatenate([np.zeros(outputs, np.uint8), inputs, launch_args.tiles_of(shape)])
    host, base = device.host_memory(staged.nbytes), device.allocate(staged.nbytes)
    host[:] = staged
    buffers = launch_args.Buffers(base + outputs, base, base + outputs + size, base + size, _VALUES)
    push = launch_args.DevicePush(base + 2 * outputs, [tuple(hyper)], np.ones(1, np.bool_))
    tiles = base + outputs + inputs.nbytes
    launches, _ = launch_args.make_launches(shape, fold.FOLD_SUM, [push], counts, buffers, tiles)
    device.copy(base, host.ctypes.data, host.nbytes, stream)
    for launch in launches:
        device.launch(launch_args.fold_kernel(rule.number, "float32"), launch, stream)
    device.copy(host.ctypes.data, base, outputs, stream)
    device.synchronize(stream)
    device.close(base)
    return host[:outputs].view(np.float32).reshape(1 + planes, _VALUES).copy()
