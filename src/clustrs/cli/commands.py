"""How commands are declared, and the classes that parse and explain them."""

import inspect
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from clustrs.cli import arguments, terminal
from clustrs.plugins import leave_out, load_entry, plugin_entries

Run = TypeVar("Run", bound=Callable[..., Any])
app = typer.Typer(add_completion=True, pretty_exceptions_enable=False)
COMMANDS = "clustrs.commands"
PLUGIN_PANEL = "From other packages"
PARSE_ONLY = "parse only"
"""As a context's object: give back what the words stand for, and run nothing."""


class HelpMixin:
    """Panels and examples in the help: with boxes on a terminal, as plain sections anywhere else."""

    examples: str | None = None

    def __init__(self, *given: Any, epilog: str | None = None, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.examples = epilog

    def format_options(self: Any, context: Any, formatter: Any) -> None:
        """Plain sections, one per panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(context):
            record = param.get_help_record(context)
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        for name in sorted(sections, key=lambda name: (name != "Arguments", name == "Options")):
            with formatter.section(name):
                formatter.write_dl(sections[name])
        if isinstance(self, TyperGroup):
            self.format_commands(context, formatter)

    def format_help(self: Any, context: Any, formatter: Any) -> None:
        self.rich_markup_mode = "rich" if terminal.is_rich(sys.stdout) else None
        super().format_help(context, formatter)  # type: ignore[misc]
        if self.examples and self.rich_markup_mode:
            terminal.print_examples(self.examples)
        elif self.examples:
            formatter.write(f"\n{self.examples}")


class Command(HelpMixin, TyperCommand):  # type: ignore[misc]
    """A command whose options are the fields of a dataclass; lists are given with spaces or commas."""

    options: type | None = None
    run: Callable[[Any], Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.options is not None and not ctx.resilient_parsing:
            lists, valued = arguments.list_flags(self.options), arguments.value_flags(self.options)
            args = arguments.join_lists(args, lists, valued)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        if self.options is None:
            return super().invoke(ctx)
        options = arguments.read(self.options, ctx.params)
        return options if ctx.obj == PARSE_ONLY else self.run(options)


class Group(HelpMixin, TyperGroup):  # type: ignore[misc]
    """A group of commands; without a word it shows its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


class Root(Group):
    """The `clustrs` command: its own commands, and those of other packages by entry points in `clustrs.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(name for name in self.plugins() if self.get_command(ctx, name))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; None where there is none, or where the plugin that offers it fails."""
        found = super().get_command(ctx, cmd_name)
        entry = self.plugins().get(cmd_name)
        if found is not None or entry is None:
            return found
        try:
            found = as_command(cmd_name, load_entry(entry))
        except ValueError as error:
            leave_out(str(error))
            return None
        self.add_command(found, cmd_name)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load all plugins where a name is unknown, so that a suggestion may be a command of theirs."""
        if self.get_command(ctx, args[0]) is None:
            self.list_commands(ctx)
        return super().resolve_command(ctx, args)

    def plugins(self) -> dict[str, EntryPoint]:
        """Return the entry points that are not in `commands`, by name."""
        return {entry.name: entry for entry in plugin_entries(COMMANDS) if entry.name not in self.commands}


def as_command(name: str, value: Any) -> Any:
    """Make a command of an entry point's value: a `typer.Typer` or a function."""
    plugin = value
    if not isinstance(value, typer.Typer):
        if not callable(value):
            raise ValueError(f"the command {name} must be a typer.Typer or a function, got {value!r}")
        plugin = typer.Typer()
        plugin.command(name, cls=Command)(value)
    plugin._add_completion = False
    found: Any = typer.main.get_group(plugin) if isinstance(value, typer.Typer) else typer.main.get_command(plugin)
    found.name = name
    if getattr(found, "rich_help_panel", None) is None:
        found.rich_help_panel = PLUGIN_PANEL
    return found


def command(name: str, *, panel: str, examples: str | None = None, group: typer.Typer = app) -> Callable[[Run], Run]:
    """Register a function of one dataclass as a command; its docstring is the help."""

    def register(run: Run) -> Run:
        (options,) = [hint for key, hint in get_type_hints(run).items() if key != "return"]
        bound = type(f"{name.capitalize()}Command", (Command,), {"options": options, "run": staticmethod(run)})
        group.command(
            name,
            cls=bound,
            help=inspect.getdoc(run),
            epilog=examples,
            rich_help_panel=panel,
            context_settings=passing_on(options),
        )(parameters(options))
        return run

    return register


def parameters(options: type) -> Callable[..., None]:
    """A function that shows Typer the parameters of a command; `Command.invoke` calls the real one."""

    def shown(**_: Any) -> None: ...

    shown.__signature__ = arguments.signature(options)  # type: ignore[attr-defined]
    return shown


def passing_on(options: type) -> dict[str, Any]:
    """Unknown options are words like others where a field takes everything else."""
    passed = any(one.metadata.get("passed_on") for one, _ in arguments.given_fields(options))
    return {"ignore_unknown_options": True} if passed else {}
