"""Where the options of `hlo-tools` end and a script's own arguments begin.

Everything after the script, or after `-m module`, belongs to the script, even
`--help` or an option that `hlo-tools` has too. The option parser below typer has
no such rule, so a "--" is put there before it sees the arguments.
"""

from collections.abc import Callable, Collection, Sequence

from typer.core import TyperCommand

from hlo_tools.errors import UnknownNameError


def is_script(argument: str) -> bool:
    """Whether a file argument is a Python program rather than a module's text."""
    return argument.endswith((".py", ".pyw"))


def end_options(
    arguments: Sequence[str],
    takes_value: Collection[str],
    ends: Callable[[str], bool] = lambda argument: True,
) -> list[str]:
    """Put "--" where the options of `hlo-tools` end.

    Args:
        arguments: what follows the subcommand's name.
        takes_value: spellings of the options that take a value.
        ends: whether a positional argument is a program, whose own arguments
            follow it.

    Returns:
        The arguments, with "--" after the program where there is one.
    """
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            return list(arguments)
        if argument.startswith("-m") and not argument.startswith("--"):
            position += argument == "-m"
            break
        if argument in takes_value:
            position += 1
        elif (argument == "-" or not argument.startswith("-")) and ends(argument):
            break
    else:
        return list(arguments)
    return [*arguments[:position], "--", *arguments[position:]]


class ProgramCommand(TyperCommand):
    """A subcommand whose first positional argument is a program with arguments."""

    ends = staticmethod(lambda argument: True)

    def parse_args(self, ctx, args):
        """See `end_options`."""
        takes_value = {
            name
            for parameter in self.params
            if not getattr(parameter, "is_flag", True)
            for name in parameter.opts
        }
        return super().parse_args(ctx, end_options(args, takes_value, self.ends))


class ProgramOrModuleCommand(ProgramCommand):
    """The same, where a file that is no Python program takes no arguments."""

    ends = staticmethod(is_script)


def check_choice(kind: str, value: str, known: Sequence[str]) -> str:
    """`value`, when it is one of `known`.

    Raises:
        UnknownNameError: it is not; the message names the closest ones.
    """
    if value not in known:
        raise UnknownNameError(kind, value, known)
    return value
