"""Where the options of `hlo-tools` end and a script's own arguments begin.

Everything after the script, or after `-m module`, belongs to the script, even
`--help` or an option that `hlo-tools` has too; `bisect` alone takes its own options
there too, up to a "--". The option parser below typer has no such rules, so a "--" is
put there before it sees the arguments.
"""

from collections.abc import Callable, Collection, Sequence

from typer.core import TyperCommand

from hlo_tools.errors import HloToolsError, UnknownNameError


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
    end = _program_end(arguments, takes_value, ends)
    if end is None:
        return list(arguments)
    return [*arguments[:end], "--", *arguments[end:]]


def _program_end(
    arguments: Sequence[str],
    takes_value: Collection[str],
    ends: Callable[[str], bool],
) -> int | None:
    """How many arguments there are up to the program, if there is one before "--"."""
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            return None
        if argument.startswith("-m") and not argument.startswith("--"):
            return position + (argument == "-m")
        if argument in takes_value:
            position += 1
        elif (argument == "-" or not argument.startswith("-")) and ends(argument):
            return position
    return None


def own_options_first(
    arguments: Sequence[str],
    takes_value: Collection[str],
    ends: Callable[[str], bool] = lambda argument: True,
) -> list[str]:
    """Move options of `hlo-tools` that come after the program to before it.

    Only those before a "--" are moved: what follows that is the program's, and so is
    every other argument.

    Args:
        arguments, takes_value, ends: as for `end_options`.

    Returns:
        The arguments, with "--" after the program where there is one.

    Raises:
        HloToolsError: an option's value is missing.
    """
    end = _program_end(arguments, takes_value, ends)
    if end is None:
        return list(arguments)
    own: list[str] = []
    others: list[str] = []
    rest = iter(arguments[end:])
    for argument in rest:
        if argument == "--":
            break
        name, equals, _ = argument.partition("=")
        if name not in takes_value or name == "-m":
            others.append(argument)
            continue
        own.append(argument)
        if not equals:
            value = next(rest, "--")
            if value == "--":
                raise HloToolsError(
                    f"option {name} needs a value; a program's own {name} goes after --"
                )
            own.append(value)
    return [*own, *arguments[:end], "--", *others, *rest]


class ProgramCommand(TyperCommand):
    """A subcommand whose first positional argument is a program with arguments."""

    ends = staticmethod(lambda argument: True)
    arrange = staticmethod(end_options)

    def parse_args(self, ctx, args):
        """See `end_options` and `own_options_first`."""
        takes_value = {
            name
            for parameter in self.params
            if not getattr(parameter, "is_flag", True)
            for name in parameter.opts
        }
        return super().parse_args(ctx, self.arrange(args, takes_value, self.ends))


class ProgramOrModuleCommand(ProgramCommand):
    """The same, where a file that is no Python program takes no arguments."""

    ends = staticmethod(is_script)


class BisectCommand(ProgramOrModuleCommand):
    """The same, where our options may also come after the program."""

    arrange = staticmethod(own_options_first)


def check_choice(kind: str, value: str, known: Sequence[str]) -> str:
    """`value`, when it is one of `known`.

    Raises:
        UnknownNameError: it is not; the message names the closest ones.
    """
    if value not in known:
        raise UnknownNameError(kind, value, known)
    return value
