"""A user's rule for a GPU: the text that the fold's kernels include, made of the rule's names and its statements in C."""

import re
from collections.abc import Sequence

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DOUBLE = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE][+-]?\d))(?:[eE][+-]?\d+)?(?![\w.])")
_RETURN = re.compile(r"\breturn\b")

STEP_PLACE = 8  # of the count of applications among a rule's numbers, behind the hyper-parameters

_TEXT = """#define FPS_USERS_PLANES {count}
FPS_DEVICE float fps_users_rule(float weight, const float gradient, float *fps_state, const float *fps_numbers) {{
{begin}
    {{
#line 1 "{name}"
{body}
    }}
{end}
    return weight;
}}
"""


def check_body(name: str, body: str) -> None:
    """Raise ValueError, in one sentence, for statements whose results would not be those of the rule in single precision."""
    code = _COMMENT.sub(" ", body)
    if found := _DOUBLE.search(code):
        raise ValueError(
            f"rule {name!r}: expected every number with a point or an exponent in cuda= to end in f, found {found[0]}: without"
            " the f C computes in double precision"
        )
    if _RETURN.search(code):
        raise ValueError(f"rule {name!r}: expected cuda= to assign the weight and the states, found a return")


def text_of(name: str, planes: Sequence[str], hypers: Sequence[str], takes_step: bool, body: str) -> str:
    """Return the text of a rule: `body` assigns to `weight` and the planes, and reads `gradient`, the hypers and `step`.

    >>> text = text_of("plain", (), ("learning_rate",), False, "weight = weight - learning_rate * gradient;")
    >>> [line.strip() for line in text.splitlines() if "fps_numbers[" in line]
    ['const float learning_rate = fps_numbers[0];']
    """
    numbers = [*enumerate(hypers), *([(STEP_PLACE, "step")] if takes_step else [])]
    begin = [f"    float {plane} = fps_state[{index}];" for index, plane in enumerate(planes)]
    begin += [f"    const float {number} = fps_numbers[{index}];" for index, number in numbers]
    begin += [f"    (void){each};" for each in ("gradient", *(number for _, number in numbers))]
    end = [f"    fps_state[{index}] = {plane};" for index, plane in enumerate(planes)] or ["    (void)fps_state;"]
    return _TEXT.format(count=len(planes), name=name, begin="\n".join(begin), body=body, end="\n".join(end))
