"""Users' own update rules: an elementwise function, compiled by Numba to a C callback that the fold calls without the GIL.

Arithmetic is in single precision, like that of the built-in rules: every number in the function's text is a float32, as NumPy
treats it beside float32 values. Fast math is off: the function computes what it says, element by element, and the compiler
vectorizes it.

A rule may read sums over a whole parameter. A second function computes an element's terms; they are added up in double
precision, in an order that depends on their places alone.
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

_FIRST_SUM = 8  # in fps_hyper's doubles, behind the hyper-parameters

LANES = 8  # running sums of one tile: the i-th element's term is added to the (i mod 8)-th
PART = 64  # floats computed at a time: few enough that prefetched loads and write-backs overlap

# Results go to arrays on the stack first. No outside pointer can alias them, so the compiler vectorizes the loop without
# overlap checks, and a rule may write where it reads.
_CALLBACK = """
def callback(length, steps, hyper, gradient, weight_in, weight_out, state_in, state_out, stride):
{sums}
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


# A call without outputs adds up terms. The lanes are independent, so the compiler vectorizes the sums without reordering one.
_SUMS = """
    if is_null(weight_out):
{prepare}
        for first in range(0, length, {part}):
            size = min({part}, length - first)
            for i in range(size):
                at = first + i
                {results} = terms(weight_in[at], gradient[at]{reads})
            for i in range(size, {part}):
                {zeros}
            for i in range(0, {part}, {lanes}):
                for lane in range({lanes}):
                    {add}
{finish}
        return
"""


def _allocated(of: Any, count: int) -> Any:
    """An intrinsic that allocates so many uninitialized numbers in the frame of the compiled function that calls it."""
    element: Any = ir.FloatType() if of is numba.float32 else ir.DoubleType()

    @numba.extending.intrinsic
    def allocated(_context: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            with builder.goto_entry_block():
                room = builder.alloca(ir.ArrayType(element, count))
            room.align = 64
            return builder.bitcast(room, element.as_pointer())

        return _types.CPointer(of)(), generate

    return allocated


on_stack = _allocated(numba.float32, PART)
lanes_on_stack = _allocated(numba.float64, LANES)


@numba.extending.intrinsic
def is_null(_context: Any, pointer: Any) -> Any:
    """Tell whether a pointer to floats is NULL."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.icmp_unsigned("==", arguments[0], ir.Constant(arguments[0].type, None))

    return numba.boolean(pointer), generate


class CompiledRule(NamedTuple):
    """A rule as machine code. `function` and `terms` compute the same in Python; `code` must outlive the address."""

    address: int
    digest: str
    function: Callable[..., Any]
    code: Any
    terms: Callable[..., Any] | None


def compile_rule(
    function: types.FunctionType,
    planes: int,
    hypers: int,
    takes_step: bool,
    terms: types.FunctionType | None = None,
    sums: int = 0,
) -> CompiledRule:
    """Compile `function(weight, gradient, plane..., hyper..., [step], sum...)`, which returns the new weight and new planes.

    `terms(weight, gradient, plane..., hyper..., [step])` returns what one element adds to each of the sums.

    Raises ValueError, in one sentence, if Numba cannot compile a function, if it returns another number or type of results,
    or if it uses outside values that are not plain numbers.
    """
    shape = _Shape(planes, hypers, takes_step, sums)
    single, digest = _in_single_precision(function)
    compiled = _compiled(single, shape.arguments + sums, 1 + planes, "the new weight and then each new state")
    added = single_terms = None
    if terms is not None:
        single_terms, of_terms = _in_single_precision(terms)
        added = _compiled(single_terms, shape.arguments, sums, "a term for each sum that the rule reads")
        digest = hashlib.sha256(f"{digest} {of_terms} {sums}".encode()).hexdigest()
    callback = _callback(compiled, added, shape)
    return CompiledRule(callback.address, digest, single, callback, single_terms)


class _Shape(NamedTuple):
    """How many values a rule takes of each kind."""

    planes: int
    hypers: int
    takes_step: bool
    sums: int

    @property
    def arguments(self) -> int:
        """The number of arguments before the sums."""
        return 2 + self.planes + self.hypers + self.takes_step


def _compiled(single: types.FunctionType, arguments: int, results: int, which: str) -> Any:
    """Compile a function of so many float32 to so many. Raises ValueError."""
    name = single.__name__
    try:
        compiled = numba.njit((numba.float32,) * arguments, error_model="numpy", forceinline=True)(single)
    except (numba.core.errors.NumbaError, NotImplementedError, TypeError) as error:
        raise ValueError(f"rule {name!r} cannot be compiled: {_first_words(error)}") from error
    found = compiled.nopython_signatures[0].return_type
    expected = numba.float32 if results == 1 else _types.UniTuple(numba.float32, results)
    if found != expected:
        raise ValueError(
            f"rule {name!r}: expected it to return {results} value{'s' if results > 1 else ''} of float32, {which}, found"
            f" {found}"
        )
    return compiled


def _callback(function: Any, terms: Any, shape: _Shape) -> Any:
    """Compile the loop over a tile as a C function of the type fps_user_rule."""
    numbers = [f"h{index} = float32(hyper[{index}])" for index in range(shape.hypers)]
    numbers += ["step = float32(steps + 1)"] * shape.takes_step
    sums = [f"sum{index} = float32(hyper[{_FIRST_SUM + index}])" for index in range(shape.sums)]
    planes = range(shape.planes)
    arguments = [f"state_in[{plane} * stride + at]" for plane in planes] + [each.split()[0] for each in numbers]
    stores = [
        line
        for plane in planes
        for line in ("for i in range(size):", f"    state_out[{plane} * stride + first + i] = plane{plane}[i]")
    ]
    text = _CALLBACK.format(
        prepare=_indented(1, [*(f"plane{plane} = on_stack()" for plane in planes), *numbers, *sums]),
        results=", ".join(["weight[i]", *(f"plane{plane}[i]" for plane in planes)]),
        reads="".join(f", {argument}" for argument in [*arguments, *(each.split()[0] for each in sums)]),
        store=_indented(2, stores),
        part=PART,
        sums=_sums_text(shape.sums, numbers, arguments) if terms is not None else "",
    )
    scope: dict[str, Any] = {"function": function, "terms": terms, "float32": numba.float32, "float64": numba.float64}
    scope |= {"on_stack": on_stack, "lanes_on_stack": lanes_on_stack, "is_null": is_null}
    exec(compile(text, "<callback of a rule>", "exec"), scope)
    floats, whole = _types.CPointer(numba.float32), numba.int64
    doubles = _types.CPointer(numba.float64)
    signature = numba.void(whole, whole, doubles, floats, floats, floats, floats, floats, whole)
    return numba.cfunc(signature, error_model="numpy")(scope["callback"])


def _sums_text(sums: int, numbers: list[str], arguments: list[str]) -> str:
    """The part of a callback that adds up an element's terms."""
    each = range(sums)
    prepare = [line for index in each for line in (f"term{index} = on_stack()", f"lanes{index} = lanes_on_stack()")]
    prepare += [f"for lane in range({LANES}):", *(f"    lanes{index}[lane] = 0.0" for index in each), *numbers]
    return _SUMS.format(
        prepare=_indented(2, prepare),
        part=PART,
        lanes=LANES,
        results=", ".join(f"term{index}[i]" for index in each),
        reads="".join(f", {argument}" for argument in arguments),
        zeros="; ".join(f"term{index}[i] = 0.0" for index in each),
        add="; ".join(f"lanes{index}[lane] += float64(term{index}[i + lane])" for index in each),
        finish=_indented(2, [f"hyper[{_FIRST_SUM + index}] += {_in_pairs(f'lanes{index}')}" for index in each]),
    )


def _in_pairs(lanes: str) -> str:
    """The sum of the lanes, as text: of neighbours, then of neighbouring sums."""
    texts = [f"{lanes}[{lane}]" for lane in range(LANES)]
    while len(texts) > 1:
        texts = [f"({one} + {other})" for one, other in zip(texts[::2], texts[1::2], strict=True)]
    return texts[0]


def _indented(levels: int, lines: list[str]) -> str:
    return "\n".join("    " * levels + line for line in lines)


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
