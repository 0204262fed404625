"""Users' rules in C: some rules in both languages, and the kernels' source as the host's C compiler compiles it."""

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastps.kernels.cuda import runtime
from fastps.kernels.cuda.launch_args import DTYPES, Launch
from tests.support.rules import lazy_rule

COMPILER = shutil.which("cc") or shutil.which("gcc")
_LAUNCH = """
unsigned long long launch(int dtype, const void *argument, int blocks) {
    static const fps_kernel kernels[3] = {fps_fold_users_float32, fps_fold_users_float16, fps_fold_users_bfloat16};
    (void)fps_check_float32, (void)fps_check_float16, (void)fps_check_bfloat16, (void)fps_copy;
    return fps_launch_on_host(kernels[dtype], argument, blocks, 256);
}
"""


def compiled(source: str) -> Callable[[str, Launch], None]:
    """A function (kernel, launch) that launches the kernels of a user's rule, from the source that a GPU gets.

    It raises ValueError for a vector that a GPU would not load or store there.
    """
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder) / "fold.c", Path(folder) / "fold.so"
        text.write_text(source + _LAUNCH)
        include = f"-I{runtime.SOURCE.parents[1]}"
        flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Werror", include]
        assert COMPILER is not None
        done = subprocess.run([COMPILER, *flags, "-o", library, text, "-lm"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        launch = ctypes.CDLL(str(library)).launch
    launch.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    launch.restype = ctypes.c_ulonglong

    def checked(kernel: str, what: Launch) -> None:
        if misaligned := launch(DTYPES[kernel.rpartition("_")[2]], what.argument.ctypes.data, what.blocks):
            raise ValueError(f"expected vectors on multiples of their size (error 716), found one at {misaligned:#x}")

    return checked


@lazy_rule(
    state=("momentum_buffer",),
    hyper=("learning_rate", "momentum"),
    cuda="""
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient;
    if (momentum_buffer != 0) weight = weight - learning_rate * copysignf(1, momentum_buffer);
    """,
)
def sign_sgd(weight: Any, gradient: Any, momentum_buffer: Any, learning_rate: Any, momentum: Any) -> Any:
    """Follow the sign of the moving average of gradients."""
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    if momentum_buffer == 0:
        return weight, momentum_buffer
    return weight - learning_rate * math.copysign(1, momentum_buffer), momentum_buffer


@lazy_rule(
    state=("square",),
    hyper=("learning_rate", "decay", "epsilon", "step"),
    initial=(1.0,),
    cuda="""
    square = decay * square + (1 - decay) * gradient * gradient; // the mean of squares
    weight = weight - learning_rate / (1.5f + step) * gradient / (sqrtf(square) + epsilon);
    """,
)
def slowing(weight: Any, gradient: Any, square: Any, learning_rate: Any, decay: Any, epsilon: Any, step: Any) -> Any:
    """Divide by the root of the mean of squares; the rate falls with the steps."""
    square = decay * square + (1 - decay) * gradient * gradient
    return weight - learning_rate / (1.5 + step) * gradient / (math.sqrt(square) + epsilon), square


@lazy_rule(cuda="weight = weight - learning_rate * gradient;")
def plain(weight: Any, gradient: Any, learning_rate: Any) -> Any:
    """Plain SGD."""
    return weight - learning_rate * gradient


@lazy_rule(
    state=("a", "b", "c", "d", "e", "f", "g", "h"),
    hyper=("learning_rate", "p", "q", "r", "s", "t", "u", "v", "step"),
    cuda="""
    const float mean = p * a + q * b + r * c + s * d + t * e + u * f + v * g + h;
    h = g; g = f; f = e; e = d; d = c; c = b; b = a; a = gradient / step;
    weight = weight - learning_rate * mean;
    """,
)
def eight(  # type: ignore[no-untyped-def]
    weight, gradient, a, b, c, d, e, f, g, h, learning_rate, p, q, r, s, t, u, v, step
):
    """Step by a weighed mean of the last eight gradients: as many states and hyper-parameters as a rule may have."""
    mean = p * a + q * b + r * c + s * d + t * e + u * f + v * g + h
    return weight - learning_rate * mean, gradient / step, a, b, c, d, e, f, g


RULES = {
    "sign_sgd": lambda: sign_sgd()(learning_rate=0.01, momentum=0.9),
    "slowing": lambda: slowing()(learning_rate=0.1, decay=0.9, epsilon=1e-8),
    "plain": lambda: plain()(learning_rate=0.1),
    "eight": lambda: eight()(learning_rate=0.01, p=0.1, q=0.2, r=0.3, s=0.4, t=0.5, u=0.6, v=0.7),
}
