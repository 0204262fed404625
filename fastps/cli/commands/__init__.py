"""fastps.cli.commands: the commands, a file for each group. The command line finds the files here; no list names them.

Border: a command parses its options, calls one function of the library, and shows or writes the result. Arrows: as fastps.cli.

A file has `commands`, a Typer application, and `ORDER`: files are listed by it. Each command names its section of the help, one
of those below; sections come in the order of their first commands.
"""

TRAIN = "Train"
WATCH = "Watch and explain a run"
MACHINE = "This machine and this build"
CHOOSE = "Choose a discipline"
SECTIONS = (TRAIN, WATCH, MACHINE, CHOOSE)
