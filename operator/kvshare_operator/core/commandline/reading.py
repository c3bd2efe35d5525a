"""What one container runs, and by which way further vLLM flags can reach it.

Why this exists: it joins the parts of this package into one answer that the injection can use without
knowing shells or parsers. Refusals come from the table of reasons.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from kvshare_operator.api import names
from kvshare_operator.api.reasons import Refusal, refusal
from kvshare_operator.core.commandline import flags, launcher, shell, shell_expansion, words

Way = Literal["args", "variable", "none"]

_KEEPS_TO_ITSELF: Final = frozenset(
    {
        "a program that cannot be seen here", "echo", "printf", ":", "test", "[", "[[", "export", "wait", "cd", "set",
        "unset", "local", "declare", "readonly", "return", "exit", "true", "false", "trap", "shift", "read",
        "source", ".",
    }
)  # fmt: skip
"""Programs and shell built-ins that start nothing with their arguments."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """A container that runs vLLM.

    Attributes:
        arguments: vLLM's own arguments as far as they can be seen.
        way: how our flags get in: appended to ``args``, through our variable, or not at all (a worker).
        filler: words that must stand before our flags in ``args`` (the `$0` of `sh -c`).
        complete: False when an image's ENTRYPOINT may set options that cannot be seen.
        script: whether a shell script starts vLLM.
        serves: whether vLLM is seen to be started here; False where only our variable is handed on, or for Ray.
        environment: variables that the command line itself sets on the way to vLLM, None for those it removes.
        needs_variable: whether the script would stop where our variable is not set.
    """

    arguments: flags.Arguments
    way: Way
    filler: tuple[str, ...] = ()
    complete: bool = True
    script: bool = False
    serves: bool = True
    environment: tuple[tuple[str, str | None], ...] = ()
    needs_variable: bool = False

    def loses(self, variable: str, part: str) -> bool:
        """Whether the command line takes ``part`` out of a path variable: it sets it anew, or removes it."""
        kept = re.compile(rf"\$[({{]{re.escape(variable)}\b|(^|:){re.escape(part)}(:|$)")
        return any(name == variable and (text is None or not kept.search(text)) for name, text in self.environment)


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a pod's annotations and the chart say about images whose command is not in the pod."""

    forwards_args: bool = False
    known_images: tuple[str, ...] = ()
    """Regular expressions of image references whose ENTRYPOINT runs vLLM's server."""


def looks_like_engine(container: Mapping[str, Any], opening: Opening) -> bool:
    """Whether this container could be the one that runs vLLM; used to pick among several."""
    env = words.environment(container)
    command, args = words.argv(container, env)
    if not command:
        return _known_image(container, opening)
    program = launcher.find_program((*command, *args))
    if program.kind in ("serve", "module", "engine"):
        return True
    if program.kind in ("shell", "shell-file", "shell-other", "ray", "unknown"):
        text = " ".join((*command, *args))
        return re.search(r"\bvllm\b|\bray start\b", text) is not None or names.ARGS_VARIABLE in text
    return False


def read_container(container: Mapping[str, Any], opening: Opening) -> Reading | Refusal:
    """Read a container's command line, or say why flags cannot be added to it."""
    name = str(container.get("name", ""))
    env = words.environment(container)
    command, args = words.argv(container, env)
    if len(command) + len(args) > words.MOST_WORDS:
        return refusal("UnknownLauncher", container=name, program=f"a command line of {len(command) + len(args)} words")
    if not command:
        if not args and not (_known_image(container, opening) or opening.forwards_args):
            return refusal("NoCommand", container=name)
        if not (opening.forwards_args or _known_image(container, opening)):
            return refusal("EntrypointUnknown", container=name, image=str(container.get("image", "")))
        program = launcher.find_program(args) if args else launcher.Program("nothing", "")
        if program.kind not in ("unknown", "nothing"):
            return _with(_of_program(name, program, env, words.unseen(container, env)), program.environment)
        found = _appended(name, flags.read(args, serve=True))
        known = _known_image(container, opening)
        return dataclasses.replace(found, complete=known) if isinstance(found, Reading) else found
    program = launcher.find_program((*command, *args))
    return _with(_of_program(name, program, env, words.unseen(container, env)), program.environment)


def _with(read: Reading | Refusal, environment: Iterable[tuple[str, str | None]]) -> Reading | Refusal:
    """The same reading with more variables that the command line sets."""
    if isinstance(read, Refusal):
        return read
    return dataclasses.replace(read, environment=(*read.environment, *environment))


def _known_image(container: Mapping[str, Any], opening: Opening) -> bool:
    image = str(container.get("image", ""))
    return any(re.search(pattern, image) for pattern in opening.known_images)


def _of_program(
    name: str, program: launcher.Program, env: words.Environment, any_text: str | None
) -> Reading | Refusal:
    if program.kind in ("serve", "module"):
        return _appended(name, flags.read(program.rest, serve=program.kind == "serve"))
    if program.kind == "engine":
        return refusal("EngineUnsupported", container=name, program=program.name)
    if program.kind == "ray" and "--head" not in program.rest:
        return Reading(flags.Arguments({}), "none", serves=False)
    if program.kind == "shell-file":
        return refusal(
            "ShellWrapper",
            container=name,
            problem=f"the script file {program.name} cannot be seen from here: start it by sh -c 'exec bash "
            f'{program.name} ${names.ARGS_VARIABLE}\' and let it pass "$@" on to vLLM',
        )
    if program.kind == "shell-other":
        problem = f"{program.name} does not split ${names.ARGS_VARIABLE} into flags as sh and bash do: use one of them"
        return refusal("ShellWrapper", container=name, problem=problem)
    if program.kind == "shell" and program.rest:
        return _of_script(name, program.rest, env.without(variable for variable, _ in program.environment), any_text)
    return refusal("UnknownLauncher", container=name, program=program.name)


def _appended(name: str, arguments: flags.Arguments) -> Reading | Refusal:
    if arguments.ends_options:
        return refusal(
            "FlagConflict",
            container=name,
            flag="a bare --",
            problem=", which ends vLLM's options, so that nothing can be appended",
        )
    return Reading(arguments, "args")


def _of_script(name: str, rest: Sequence[str], env: words.Environment, any_text: str | None) -> Reading | Refusal:
    text, zero, positional = rest[0], rest[1:2], rest[2:]
    if words.HOLE in text and any_text is not None:
        problem = (
            f"Kubernetes may put any text in the place of {any_text}: write ${{{any_text[2:-1]}}} for a variable, "
            f"which the shell fills in, or ${any_text} for a command"
        )
        return refusal("ShellWrapper", container=name, problem=problem)
    try:
        script = shell.read_script(text, positional, env, names.ARGS_VARIABLE)
    except shell_expansion.TooLongError:
        return refusal("ShellWrapper", container=name, problem="it is too long to be read")
    servers = [
        (command, program)
        for command in script.commands
        if (program := launcher.find_program(command.words)).kind in ("serve", "module")
    ]
    if servers:
        found = _of_servers(name, script, servers, filler=() if zero else ("bash",))
        return _with(found, _environment(script, servers))
    engines = [p for c in script.commands if (p := launcher.find_program(c.words)).kind == "engine"]
    if engines:
        return refusal("EngineUnsupported", container=name, program=engines[0].name)
    rays = [(c, p) for c in script.commands if (p := launcher.find_program(c.words)).kind == "ray"]
    if rays and not any("--head" in program.rest for _, program in rays):
        return _with(Reading(flags.Arguments({}), "none", serves=False), _environment(script, rays))
    users = [command for command in script.commands if command.ours and _passes_on(command)]
    alone = all(reference == "none" for command in users for reference in command.ours)
    if users and alone and not script.sets_ours and not _unsplit(script):
        why = "the script does not start vLLM where it can be seen"
        unseen = {option: flags.Seen(unknown=why) for option in flags.WATCHED}
        handed = Reading(
            flags.Arguments(unseen), "variable", script=True, serves=False, needs_variable=script.needs_ours
        )
        return _with(handed, _environment(script, [(one, launcher.find_program(one.words)) for one in users]))
    return refusal("ShellWrapper", container=name, problem=_missing(script))


def _environment(
    script: shell.Script, starts: Sequence[tuple[shell.Command, launcher.Program]]
) -> Iterator[tuple[str, str | None]]:
    """Return what a script sets for some of its commands; what `env` sets there is among the command's own words."""
    yield from script.environment
    for command, program in starts:
        yield from command.environment
        yield from (one for one in program.environment if one[1] is None)


def _of_servers(
    name: str,
    script: shell.Script,
    servers: Sequence[tuple[shell.Command, launcher.Program]],
    filler: tuple[str, ...],
) -> Reading | Refusal:
    """A script with one or more places that start vLLM: the same way must work at each of them."""
    arguments = _agreeing(
        [
            flags.read([word for word in program.rest if word != words.OURS], serve=program.kind == "serve")
            for _, program in servers
        ]
    )
    commands = [command for command, _ in servers]
    if any(command.ours for command in commands):
        problem = _torn(commands) or _set_by_itself(script) or _unsplit(script)
        if problem is None and all(command.ours for command in commands):
            if any(_ended(program.rest) for _, program in servers):
                return _appended(name, dataclasses.replace(arguments, ends_options=True))
            return Reading(arguments, "variable", script=True, needs_variable=script.needs_ours)
        problem = problem or "only some of the places that start vLLM pass our flags on"
    elif all(command.positional for command in commands):
        if any("joined" in command.positional for command in commands):
            problem = 'it passes "$*", or $@ glued to other text, on, which tears arguments'
        elif _unsplit(script) and any("bare" in command.positional for command in commands):
            problem = "it sets IFS, which tears the words of an unquoted $@"
        elif script.moves_positional:
            problem = "further arguments would change it: it uses shift, set, $#, $1 or a function beside $@"
        elif arguments.ends_options:
            return _appended(name, arguments)
        else:
            return Reading(arguments, "args", filler, script=True)
    elif any(command.positional for command in commands):
        problem = "only some of the places that start vLLM pass our flags on"
    else:
        problem = f"vLLM's arguments in it do not contain ${names.ARGS_VARIABLE}"
    return refusal("ShellWrapper", container=name, problem=problem)


def _ended(rest: Sequence[str]) -> bool:
    """Whether a bare `--` stands in front of our variable among vLLM's arguments."""
    return words.OURS in rest and "--" in rest[: rest.index(words.OURS)]


def _torn(commands: Sequence[shell.Command]) -> str | None:
    references = {reference for command in commands for reference in command.ours}
    if "double" in references:
        return f"${names.ARGS_VARIABLE} stands in double quotes, so all flags would arrive as one word"
    if "glued" in references:
        return f"${names.ARGS_VARIABLE} is glued to other text, which tears the first or last flag"
    return None


def _set_by_itself(script: shell.Script) -> str | None:
    return f"it sets or unsets {names.ARGS_VARIABLE} itself" if script.sets_ours else None


def _unsplit(script: shell.Script) -> str | None:
    """Say so when the script's IFS is not blanks: it would not part our flags, or tear them at other characters."""
    usual = re.compile(r"(\s|\\[tn])* (\s|\\[tn])*")
    if all(name != "IFS" or text is None or usual.fullmatch(text) for name, text in script.environment):
        return None
    return f"it sets IFS, so that blanks do not split ${names.ARGS_VARIABLE} into flags"


def _agreeing(several: Sequence[flags.Arguments]) -> flags.Arguments:
    """Merge the readings of several places; where they differ, the option is unknown."""
    first = several[0]
    options = {}
    for option in {option for one in several for option in one.options}:
        seen = {one.get(option) for one in several}
        options[option] = seen.pop() if len(seen) == 1 else flags.Seen(unknown="the script has several values for it")
    dotted = tuple(item for one in several for item in one.dotted)
    return flags.Arguments(
        options,
        first.dotted if len(several) == 1 else tuple(dict.fromkeys(dotted)),
        any(one.ends_options for one in several),
    )


def _passes_on(command: shell.Command) -> bool:
    """Whether a command other than vLLM may hand our flags on: a program or script that its author chose."""
    program = launcher.find_program(command.words)
    if words.OURS in command.words[0] or program.name in _KEEPS_TO_ITSELF or program.name.startswith("env "):
        return False
    return program.kind in ("unknown", "shell-file")


def _missing(script: shell.Script) -> str:
    problem = _torn(script.commands) or _set_by_itself(script) or _unsplit(script)
    if problem is not None:
        return problem
    if any(command.ours for command in script.commands):
        return f"${names.ARGS_VARIABLE} does not stand among arguments of vLLM"
    if script.in_here_document:
        return f"${names.ARGS_VARIABLE} stands only in a here-document"
    return f"it does not expand ${names.ARGS_VARIABLE}"
