"""The repository itself: what may stand where, and what every file owes its reader."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvshare_layout", "kvshare_connector", "kvshare_operator")
MOST_LINES = 600
#: The only handlers of kopf, besides the index, that the operator may use: others write finalizers and annotations.
KOPF_ALLOWED = {"on.startup", "on.cleanup", "on.login", "on.event"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}


def _files() -> Iterator[Path]:
    """Python files that belong to the repository: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    yield from (ROOT / name for name in sorted(set(listed.stdout.splitlines())) if (ROOT / name).exists())


FILES = list(_files())
SOURCES = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("connector", "operator")]
TESTS = [path for path in FILES if path.name.startswith("test_") and path.relative_to(ROOT).parts[0] == "tests"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_standard_librarys_operator_is_not_shadowed() -> None:
    """A package of that name breaks Python itself as soon as somebody stands in the repository's root."""
    for folder in ("operator", "connector", "tests", "tests/operator"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / "tests" / "operator").exists()


def test_test_folders_are_no_packages() -> None:
    """Equal file names in two folders must not meet; the test bed is the one package."""
    inside = [path for path in (ROOT / "tests").rglob("__init__.py") if "testbed" not in path.parts]
    assert inside == []


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_stay_readable(path: Path) -> None:
    """At most 600 lines, a name that says something, and a docstring that says what may live here."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert path.stem not in VAGUE
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", TESTS, ids=_name)
def test_tests_are_sentences(path: Path) -> None:
    """Every test has a docstring of its own."""
    silent = [
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_sources_are_finished(path: Path) -> None:
    """Nothing is left to be done, nothing is only there for show."""
    text = path.read_text(encoding="utf-8")
    assert not [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]
    stubs = [
        node.name
        for cls in ast.walk(ast.parse(text))
        if isinstance(cls, (ast.ClassDef, ast.Module)) and not _is_protocol(cls)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and _is_ellipsis(node.body[-1])
    ]
    assert stubs == []


def _is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Protocol" for b in node.bases)


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _all_of(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", [p for p in SOURCES if _all_of(p) is not None], ids=_name)
def test_what_is_promised_exists(path: Path) -> None:
    """``__all__`` is sorted, without repeats, and true."""
    names = _all_of(path)
    assert names is not None
    assert len(set(names)) == len(names)
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")
    module = importlib.import_module(dotted)
    assert [name for name in names if not hasattr(module, name)] == []


def test_the_pure_package_imports_without_anything_else() -> None:
    """Both images can load it: only the standard library, in a process that has no other path."""
    modules = [f"kvshare_layout.{m.name}" for m in pkgutil.iter_modules([str(ROOT / "connector" / "kvshare_layout")])]
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'connector')!r})\n" + "".join(f"import {m}\n" for m in modules)
    code += (
        "foreign = [n for n in sys.modules if n.partition('.')[0] not in sys.stdlib_module_names | {'kvshare_layout'}"
        " and not n.startswith('__') and n not in sys.builtin_module_names]\n"
        "assert not [n for n in foreign if getattr(sys.modules[n], '__file__', None)], foreign"
    )
    # -I -S: no site packages, no environment.
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_importing_the_connector_package_is_free() -> None:
    """vLLM's configuration may import it in every process."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'connector')!r})\n"
        "import kvshare_connector, kvshare_connector.store, kvshare_connector.kernels\n"
        "assert not {'torch', 'vllm', 'mooncake', 'triton'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_layers_import_each_other_only_downwards() -> None:
    """The contracts of ``.importlinter``."""
    program = Path(sys.executable).parent / "lint-imports"
    if not program.exists():
        pytest.skip("import-linter is not installed")
    run = subprocess.run(
        [program, "--config", str(ROOT / ".importlinter")],
        cwd=ROOT,
        env={
            "PYTHONPATH": ":".join(str(ROOT / folder) for folder in ("connector", "operator", "tests", "")),
            "PATH": str(program.parent),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def _kopf_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith("kopf."):
                yield text.removeprefix("kopf.")


@pytest.mark.parametrize("path", [p for p in SOURCES if "operator" in p.relative_to(ROOT).parts[0]], ids=_name)
def test_kopf_is_used_without_handlers_that_write(path: Path) -> None:
    """Timers, daemons and change handlers write finalizers and annotations; two processes then fight over them."""
    used = {name for name in _kopf_names(path) if name.startswith("on.") or name in ("timer", "daemon", "subhandler")}
    assert used <= KOPF_ALLOWED


def _packages_imported(nodes: Iterable[ast.AST]) -> set[str]:
    modules: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("path", [path for path in FILES if path not in SOURCES], ids=_name)
def test_tests_are_collected_where_mooncake_cannot_be_loaded(path: Path) -> None:
    """All groups collect all files, and a new machine has no RDMA library before the group that needs one."""
    assert "mooncake" not in _packages_imported(ast.parse(path.read_text(encoding="utf-8")).body)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_only_one_file_imports_mooncake(path: Path) -> None:
    """The edge is one file; everything else talks to the interface."""
    text = path.read_text(encoding="utf-8")
    assert "mooncake" not in _packages_imported(ast.walk(ast.parse(text)))
    assert ('import_module("mooncake' in text) == (path.name == "installation.py" and path.parent.name == "store")
