"""reference/cli.md, from the command line's own definitions."""

import inspect
import re

import typer.main

from generator.source import cell
from kvshare_operator.cli.main import app

HEAD = """# The command `kvshare`

From a checkout, in a virtual environment: `pip install '.[cli]'`, or `'.[check]'` for `kvshare check`,
`kvshare must-gather` and `kvshare purge` as well; `kvshare --install-completion` sets up the shell, `kvshare --version`
says which one this is. Results go to standard output, words about them to standard error; colours only on a terminal.

| Exit code | Meaning |
|---|---|
| 0 | good |
| 1 | refused or inconsistent, with every reason named |
| 2 | wrong usage, with every mistake named |
| 3 | the cluster cannot be reached |
"""


def page() -> str:
    """Every command with its options and examples."""
    group = typer.main.get_command(app)
    out = [HEAD]
    for name, command in getattr(group, "commands").items():  # noqa: B009 - the group's type is typer's own
        text, _, examples = inspect.cleandoc(command.help or "").partition("Examples:")
        out.append(f"\n## kvshare {name}\n\n{text.strip()}\n")
        if examples.strip():
            out.append(f"\n```\n{_examples(examples)}\n```\n")
        out.append("\n| Option | Default | Meaning |\n|---|---|---|\n")
        for parameter in command.params:
            if parameter.name == "help":
                continue
            options = ", ".join(f"`{option}`" for option in parameter.opts)
            what = f" `{parameter.metavar}`" if parameter.metavar else ""
            default = getattr(parameter.default, "value", parameter.default)
            shown = "*required*" if parameter.required else f"`{default}`" if default not in (None, "", []) else ""
            out.append(f"| {options}{what} | {shown} | {cell(getattr(parameter, 'help', '') or '')} |\n")
    return "".join(out)


def _examples(text: str) -> str:
    lines = inspect.cleandoc(text).strip().splitlines()
    return re.sub(r"\n{2,}", "\n", "\n".join(line.strip() for line in lines))
