"""How commands read and show their options: groups in the help, an example a line, the nearest name of a wrong one."""

import os
from typing import Any

from typer.core import TyperCommand

from fastps.cli.options import PANELS
from fastps.errors import UsageError

SYNONYMS = {
    "workers": ("--nproc-per-node", "--nproc_per_node", "-np", "--np"),
    "restarts": ("--max-restarts", "--max_restarts"),
    "rendezvous": ("--rdzv-endpoint", "--rdzv_endpoint"),
    "node_rank": ("--node_rank",),
    "log_dir": ("--log_dir",),
}
"""Names that torchrun and mpirun have for options of `fastps run`: they are understood, and the help leaves them out."""


class Command(TyperCommand):
    """A command of fastps. Raises UsageError for an option that it does not have."""

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the options, which also knows their synonyms."""
        parser = super().make_parser(ctx)
        if self.name == "run":
            option: Any
            for option in self.get_params(ctx):
                if names := SYNONYMS.get(option.name or ""):
                    parser.add_option(obj=option, opts=names, dest=option.name)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the command line. An unknown option is answered with the nearest."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option: Any = getattr(error, "param", None)  # of click's BadParameter
            variable = getattr(option, "envvar", None)
            if isinstance(variable, str) and variable in os.environ and not self._has(option, args):
                raise UsageError(
                    f"expected the environment variable {variable} to be a value of {option.opts[0]}"
                    f" (fastps {self.name} --help), found {os.environ[variable][:40]!r}"
                ) from None
            if not hasattr(error, "possibilities"):  # click's NoSuchOption, which typer keeps in different places
                raise
            near = (error.possibilities or [""])[0]
            raise UsageError(
                f"expected an option of fastps {self.name}, found {error.option_name!r}"  # type: ignore[attr-defined]
                f"{f', which is nearest to {near}' if near else ''}; fastps {self.name} --help lists all"
            ) from None

    @staticmethod
    def _has(option: Any, args: list[str]) -> bool:
        return any(each.partition("=")[0] in option.opts for each in args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group: those of the panel that an option names, and first those that name none."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                own = "Arguments" if each.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(each, "rich_help_panel", None) or own, []).append(record)
        for title in sorted(groups, key=lambda title: PANELS.index(title) if title in PANELS else -1):
            with formatter.section(title):
                formatter.write_dl(groups[title])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one a line, unwrapped: to be copied."""
        if self.epilog:
            title, _, examples = self.epilog.partition(":")
            formatter.write(f"\n{title}:\n" + "".join(f"  {each.strip()}\n" for each in examples.split("   |   ")))
