"""The page of all commands: what ``--help`` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from hflow.cli.app import app

HEAD = """\
# Commands

Everything that `hflow` can be asked, from its own help. Exit codes: 0 if all went well, 1 for what a user can
mend, with a message that says where and how, 130 after Ctrl-C.
"""


def commands_page() -> str:
    """Every command with its arguments and options."""
    return "\n".join([HEAD, *_sections(typer.main.get_command(app), "hflow")])


def _sections(group: Any, name: str) -> Iterator[str]:
    for word, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _sections(command, f"{name} {word}")
        else:
            yield from _section(command, f"{name} {word}")


def _section(command: Any, name: str) -> Iterator[str]:
    arguments = " ".join(_argument(each) for each in command.params if each.param_type_name == "argument")
    yield f"## {name}\n"
    yield f"```sh\n{' '.join(filter(None, (name, arguments)))}\n```\n"
    yield f"{(command.help or '').strip()}\n"
    rows = [_row(each) for each in command.params if each.help and not getattr(each, "hidden", False)]
    if rows:
        yield "\n".join(["| argument, option | meaning |", "|---|---|", *rows]) + "\n"


def _argument(argument: Any) -> str:
    name = argument.name.rstrip("_").upper()
    name = f"{name}..." if argument.nargs == -1 else name
    return name if argument.required else f"[{name}]"


def _row(param: Any) -> str:
    names = [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else [_argument(param)]
    value = f" {param.metavar}" if param.param_type_name == "option" and param.metavar else ""
    shown = ", ".join(f"`{name}{value}`" for name in names)
    return f"| {shown} | {' '.join(param.help.split()).replace('|', chr(92) + '|')} |"
