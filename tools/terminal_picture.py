"""`python tools/terminal_picture.py FILE.svg COMMAND...`: run a command, and draw what a terminal shows at its end as SVG.

python tools/terminal_picture.py docs/images/compare.svg fastps compare --sync bsp,asp --epochs 3 --straggler 0:3
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 96
_FONT_FROM_A_NETWORK = re.compile(r"\s*@font-face \{[^}]*\}")


def drawn(command: list[str], printed: str) -> str:
    """The picture of a prompt with the command, and of what it printed after its last live line.

    >>> "hello" in drawn(["echo", "hello"], "hello")
    True
    >>> "http" in drawn(["echo"], "").replace("http://www.w3.org/2000/svg", "")
    False
    """
    last = re.split(r"\x1b\[2K|\x1b\[\?25h", printed)[-1]
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print(Text("$ " + " ".join(command)), soft_wrap=False)
        console.print(Text.from_ansi(last.strip("\n")))
        svg = console.export_svg(title="fastps", unique_id="terminal")
    return re.sub(r"<!--.*?-->\s*", "", _FONT_FROM_A_NETWORK.sub("", svg), flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Run the command and write the picture. Returns the command's exit code."""
    if len(arguments) < 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    target, *command = arguments
    told = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, env=told, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        Path(target).write_text(drawn(command, done.stdout) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
