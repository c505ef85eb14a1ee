"""The package's rooms: which may import which, without a circle, and each file one thing."""

import ast
import graphlib

import pytest
from commands import ROOT

PACKAGE = ROOT / "multimax_fairseq"
GROUND = ("errors", "files", "signature")
# What each room may import beside itself and the ground floor.
BELOW = {
    "": {"functional", "modules", "compat"},  # the package itself, and `python -m`
    "kernels": set(),
    "functional": {"kernels"},
    "modules": {"functional"},
    "models": {"functional", "modules", "compat", "criterions", "optim"},
    "criterions": {"functional"},
    "optim": set(),
    "compat": set(),
    "analysis": {"functional", "modules", "models", "compat"},
    "convert": {"models", "compat"},
    "transformers": {"functional", "modules", "models"},
    **{name: set() for name in GROUND},
}
# What may not be imported at all where a room is to work without it.
BARRED = {"kernels": {"fairseq"}, "functional": {"fairseq"}}
# ... and, but for the last room, everywhere.
LARGE = {"transformers"}


def modules():
    """{dotted name: file}, of the whole package."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file, at_start=False):
    """The names that a file imports; only those at its start, not within functions, if asked."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = tree.body if at_start else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name):
    parts = name.split(".")
    is_room = len(parts) > 1 and parts[1] in BELOW
    return parts[1] if is_room else ""


@pytest.mark.parametrize("name", BELOW)
def test_a_room_imports_from_below(name):
    # The commands of the analysis name what is missing, so they import fairseq late.
    allowed = BELOW[name] | {*GROUND, name}
    files = [file for module, file in modules().items() if room(module) == name]
    assert files
    for file in files:
        for imported in imports(file):
            top, _, rest = imported.partition(".")
            assert top not in BARRED.get(name, ()), f"{file} imports {imported}"
            assert top not in LARGE - {name}, f"{file} imports {imported}"
            if top == "multimax_fairseq" and rest.split(".")[0] in BELOW:
                assert rest.split(".")[0] in allowed, f"{file} imports {imported}"


def test_no_circle():
    known = modules()
    graph = {
        name: {
            found
            for imported in imports(file, at_start=True)
            for found in (imported, imported.rpartition(".")[0])
            # A part of a package may import another part of it: the package is then on its way.
            if found in known and not f"{name}.".startswith(f"{found}.")
        }
        for name, file in known.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_a_file_is_one_thing():
    folders = ("multimax_fairseq", "scripts", "data-prep", "user_dir", "tests")
    for folder in folders:
        most = 700 if folder == "tests" else 600
        for file in (ROOT / folder).rglob("*.py"):
            assert len(file.read_text(encoding="utf-8").splitlines()) <= most, file
