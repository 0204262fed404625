"""Users' own update rules: an elementwise function, compiled by Numba to a C callback that the fold calls without the GIL.

Arithmetic is in single precision, like that of the built-in rules: every number in the function's text is a float32, as NumPy
treats it beside float32 values. Fast math is off: the function computes what it says, element by element, and the compiler
vectorizes it.
"""

import hashlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from llvmlite import ir

_types: Any = numba.types  # partly untyped

PART = 64  # floats computed at a time: few enough that prefetched loads and write-backs overlap

# Results go to arrays on the stack first. No outside pointer can alias them, so the compiler vectorizes the loop without
# overlap checks, and a rule may write where it reads.
_CALLBACK = """
def callback(length, steps, hyper, gradient, weight_in, weight_out, state_in, state_out, stride):
    weight = on_stack()
{prepare}
    for first in range(0, length, {part}):
        size = min({part}, length - first)
        for i in range(size):
            at = first + i
            {results} = function(weight_in[at], gradient[at]{reads})
        for i in range(size):
            weight_out[first + i] = weight[i]
{store}
"""


@numba.extending.intrinsic
def on_stack(_context: Any) -> Any:
    """Allocate PART uninitialized floats in the frame of the compiled function that calls this."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(ir.FloatType(), PART))
        room.align = 64
        return builder.bitcast(room, ir.FloatType().as_pointer())

    return _types.CPointer(numba.float32)(), generate


class CompiledRule(NamedTuple):
    """A rule as machine code. `function` computes the same in Python; `code` must be kept alive with the address."""

    address: int
    digest: str
    function: Callable[..., Any]
    code: Any


def compile_rule(function: types.FunctionType, planes: int, hypers: int, takes_step: bool) -> CompiledRule:
    """Compile `function(weight, gradient, plane..., hyper..., [step])`, which returns the new weight and the new planes.

    Raises ValueError, in one sentence, if Numba cannot compile the function, if it returns another number or type of results,
    or if it uses outside values that are not plain numbers.
    """
    name = function.__name__
    single, digest = _in_single_precision(function)
    arguments = (numba.float32,) * (2 + planes + hypers + takes_step)
    try:
        compiled = numba.njit(arguments, error_model="numpy", forceinline=True)(single)
    except (numba.core.errors.NumbaError, NotImplementedError, TypeError) as error:
        raise ValueError(f"rule {name!r} cannot be compiled: {_first_words(error)}") from error
    found = compiled.nopython_signatures[0].return_type
    expected = _types.UniTuple(numba.float32, 1 + planes) if planes else numba.float32
    if found != expected:
        raise ValueError(
            f"rule {name!r}: expected it to return {1 + planes} value{'s' if planes else ''} of float32, the new weight and"
            f" then each new state, found {found}"
        )
    callback = _callback(compiled, planes, hypers, takes_step)
    return CompiledRule(callback.address, digest, single, callback)


def _callback(compiled: Any, planes: int, hypers: int, takes_step: bool) -> Any:
    """Compile the loop over a tile as a C function of the type fps_user_rule."""
    numbers = [f"h{index} = float32(hyper[{index}])" for index in range(hypers)] + ["step = float32(steps + 1)"] * takes_step
    arguments = [f"state_in[{plane} * stride + at]" for plane in range(planes)] + [each.split()[0] for each in numbers]
    stores = [
        line
        for plane in range(planes)
        for line in ("for i in range(size):", f"    state_out[{plane} * stride + first + i] = plane{plane}[i]")
    ]
    text = _CALLBACK.format(
        prepare="\n".join("    " + line for line in [*(f"plane{plane} = on_stack()" for plane in range(planes)), *numbers]),
        results=", ".join(["weight[i]", *(f"plane{plane}[i]" for plane in range(planes))]),
        reads="".join(f", {argument}" for argument in arguments),
        store="\n".join("        " + line for line in stores),
        part=PART,
    )
    scope: dict[str, Any] = {"function": compiled, "on_stack": on_stack, "float32": numba.float32}
    exec(compile(text, "<callback of a rule>", "exec"), scope)
    floats, whole = _types.CPointer(numba.float32), numba.int64
    doubles = _types.CPointer(numba.float64)
    signature = numba.void(whole, whole, doubles, floats, floats, floats, floats, floats, whole)
    return numba.cfunc(signature, error_model="numpy")(scope["callback"])


def _in_single_precision(function: types.FunctionType) -> tuple[types.FunctionType, str]:
    """Return the function with every number as a float32, and a digest of all that its results depend on."""
    code = function.__code__
    outside = _outside(function)
    single = types.FunctionType(
        code.replace(co_consts=tuple(_single(value) for value in code.co_consts)),
        {**function.__globals__, **{name: _single(value) for name, value in outside.items()}},
        function.__name__,
        None,
        tuple(types.CellType(_single(outside[name])) for name in code.co_freevars),
    )
    values = sorted((name, repr(value) if _is_number(value) else "") for name, value in outside.items())
    constants = code.co_consts if function.__doc__ is None else code.co_consts[1:]  # the first is the docstring
    parts = (code.co_code, constants, code.co_names, code.co_varnames, values)
    return single, hashlib.sha256(repr(parts).encode()).hexdigest()


def _outside(function: types.FunctionType) -> dict[str, Any]:
    """Return the outside names that the function uses: numbers, which are compiled in, modules, and built-in functions."""
    code = function.__code__
    if any(isinstance(value, types.CodeType) for value in code.co_consts):
        raise ValueError(f"rule {function.__name__!r}: expected plain expressions, found a function or a comprehension within")
    cells = function.__closure__ or ()
    outside = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    outside |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, value in outside.items():
        if not (_is_number(value) or isinstance(value, types.ModuleType | types.BuiltinFunctionType)):
            raise ValueError(
                f"rule {function.__name__!r} uses {name!r} from outside, a {type(value).__name__}: expected numbers and modules"
                " only, because all workers must run the same code"
            )
    return outside


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def _single(value: Any) -> Any:
    return np.float32(value) if _is_number(value) and not isinstance(value, bool) else value


def _first_words(error: Exception) -> str:
    """Return the first meaningful line of a compiler's message, without Numba's internals."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith(("Failed in", "During:", "- Resolution", "File ", ">>>"))]
    return (telling or [type(error).__name__])[0].rstrip(".:")
