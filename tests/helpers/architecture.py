"""Rules of the source tree, as functions from modules to the list of places that break a rule."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "samestep"
# From the bottom up; rooms on one line do not import each other. The package itself ("") and __main__
# stand above every room: nothing below may import them.
FLOORS = [
    ["report_text"],
    ["errors"],
    ["number_text", "torchvision_import"],
    ["cursor", "microbatches"],
    ["config"],
    ["distributed"],
    ["launcher"],
    ["reduce"],
    ["data", "metrics", "loggers"],
    ["checkpoint"],
    ["view"],
    ["strategies"],
    ["runs"],
    ["session"],
    ["checkpoint_manager", "zoo", "parallelize"],
    ["loading"],
    ["script"],
    ["recipes"],
    ["tools"],
    ["cli"],
    ["", "__main__"],
]
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
ENVIRONMENT_READER = f"{PACKAGE}.distributed.env"
DEVICE_MODULE = f"{PACKAGE}.distributed.devices"
READING_MODULE = f"{PACKAGE}.distributed.device_reads"
WITHOUT_READS = ("launcher", "tools", "zoo")  # of results of collectives
# Modules that may import pickle, with reasons: the first sends functions and results between processes of one launch,
# as multiprocessing does; the second reads weights that Paddle saved, by an unpickler that admits arrays only.
PICKLE_USERS = {f"{PACKAGE}.launcher.pickling", f"{PACKAGE}.zoo.paddle"}
FILE_LINES = 500
# A new feature fits, or replaces another. Lower these with each removal: the design has 32,000 lines
# in 180 files, of which 16,000 are the core.
BUDGET = {"lines": 52_017, "files": 252, "lines of the core": 33_896}
# Of all Python files of the tests, and of those that tests import; the aims are 40,000 and 4,000.
TEST_BUDGET = {"tests": 60_912, "helpers and workers": 5_765}
RINGS = {"recipes", "zoo", "tools", "cli"}
FUNCTION_LINES = 60

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve"}
OBJECT_COLLECTIVE = re.compile(r"^(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
BOUNDARY = re.compile(r"#\s*boundary:\s*\S")
BROAD = {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    source: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local names, and the complete names that they were imported from."""
        return aliases(self)

    @property
    def room(self) -> str:
        return room_of(self.name)

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


Modules = dict[str, Module]


def room_of(name: str) -> str:
    """First name under the package: '' for the package itself."""
    return [*name.split("."), ""][1]


def read_modules(root: Path) -> Modules:
    """Every module of the package below `root`, the folder that holds the package."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, source, ast.parse(source))
    return modules


# --- names -----------------------------------------------------------------------------------------------


def import_stem(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name that a `from ... import` takes from."""
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def aliases(module: Module) -> dict[str, str]:
    """Return the full imported name of each local name."""
    found = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.split(".")[0]
                found[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom):
            stem = import_stem(module, node)
            found.update({name.asname or name.name: f"{stem}.{name.name}" for name in node.names})
    return found


def full_name(node: ast.AST, known: dict[str, str]) -> str:
    """`np.random.rand` as 'numpy.random.rand'; '' for other nodes."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = full_name(node.value, known)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def names_used(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every dotted name in the module and every name that a `from ... import` brings in, in full."""
    known = module.aliases
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, full_name(node, known)
        elif isinstance(node, ast.ImportFrom):
            stem = import_stem(module, node)
            yield from ((node, f"{stem}.{name.name}") for name in node.names)


# --- imports ---------------------------------------------------------------------------------------------


def imports(module: Module, modules: Modules) -> Iterator[tuple[ast.AST, str]]:
    """The modules of the package that `module` imports, wherever the import stands, also for type checkers only."""
    for node in module.nodes:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = import_stem(module, node)
            full = [f"{stem}.{name.name}" for name in node.names]
            targets = [name if name in modules else stem for name in full]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            targets = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        for target in targets:
            if target.split(".")[0] == PACKAGE and target != module.name:
                yield node, target


def imports_going_up(modules: Modules) -> list[str]:
    """Imports into another room that is not strictly lower, and rooms without a level."""
    broken = [f"{m.name}: room '{m.room}' has no level" for m in modules.values() if m.room not in LEVELS]
    for module in modules.values():
        for node, target in imports(module, modules):
            room = room_of(target)
            level = LEVELS.get(room, max(LEVELS.values()))
            if room != module.room and level >= LEVELS.get(module.room, level):
                broken.append(module.at(node, f"imports {target}, which is not below it"))
    return broken


def import_cycles(modules: Modules) -> list[str]:
    graph = {m.name: {target for _, target in imports(m, modules)} for m in modules.values()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["import cycle: " + " <- ".join(error.args[1])]
    return []


# --- rules of all modules --------------------------------------------------------------------------------


def environment_reads(module: Module) -> list[str]:
    if module.name == ENVIRONMENT_READER:
        return []
    return [module.at(node, f"uses {name}") for node, name in names_used(module) if name in ENVIRONMENT]


def device_calls(module: Module) -> list[str]:
    """Uses of torch.cuda, and comparisons with the name of a kind of accelerator."""
    if module.name == DEVICE_MODULE:
        return []
    broken = [module.at(node, f"uses {name}") for node, name in names_used(module) if name.startswith("torch.cuda")]
    for node in module.nodes:
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if any(isinstance(operand, ast.Constant) and operand.value == "cuda" for operand in operands):
            broken.append(module.at(node, "compares with 'cuda'"))
    return broken


def unmarked_reads(module: Module) -> list[str]:
    """Copies to the CPU that are not marked as waits, in packages that run beside collectives."""
    if module.name == READING_MODULE or room_of(module.name) in WITHOUT_READS:
        return []
    return [
        module.at(node, "calls cpu()")
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cpu"
    ]


def unpickling(module: Module) -> list[str]:
    """Pickle imports, torch.load without weights_only=True, allow_pickle=True, object collectives."""
    if module.name in PICKLE_USERS:
        return []
    known, broken = module.aliases, []
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            stems = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            broken += [module.at(node, f"imports {s}") for s in stems if s.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.Call):
            true = {k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
            if full_name(node.func, known) == "torch.load" and "weights_only" not in true:
                broken.append(module.at(node, "torch.load without weights_only=True"))
            if "allow_pickle" in true:
                broken.append(module.at(node, "allow_pickle=True"))
    for node, name in names_used(module):
        last = name.rpartition(".")[2] or getattr(node, "attr", "")
        if OBJECT_COLLECTIVE.match(last):
            broken.append(module.at(node, f"uses {last}, which unpickles the received bytes"))
    return broken


def swallowed_exceptions(module: Module) -> list[str]:
    """Return broad handlers that neither raise nor have `# boundary: reason` on their first line."""
    known, lines, broken = module.aliases, module.source.splitlines(), []
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            raises = any(isinstance(n, ast.Raise) for statement in node.body for n in same_scope(statement))
        elif isinstance(node, ast.Call) and full_name(node.func, known) == "contextlib.suppress":
            caught, raises = node.args, False
        else:
            continue
        broad = any(kind is None or full_name(kind, known) in BROAD for kind in caught)
        if broad and not raises and not BOUNDARY.search(lines[node.lineno - 1]):
            broken.append(module.at(node, "catches everything and does not raise"))
    return broken


def same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and all nodes below it, without the bodies of functions and classes defined there."""
    yield node
    if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from same_scope(child)


def stubs(module: Module) -> list[str]:
    found = (n for n in module.nodes if isinstance(n, ast.Raise) and n.exc is not None)
    return [module.at(n, "is a stub") for n in found if "NotImplementedError" in ast.unparse(n)]


def joined_assignments(module: Module) -> list[str]:
    """Assignments of several values in one statement, although none of them needs the old value of a target."""
    broken = []
    for node in module.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if not isinstance(node.targets[0], ast.Tuple):
            continue
        targets = {ast.unparse(target) for target in node.targets[0].elts}
        used = {ast.unparse(below) for below in ast.walk(node.value) if isinstance(below, ast.Name | ast.Attribute)}
        if not targets & used:
            broken.append(module.at(node, "assigns several values in one statement"))
    return broken


def conditions_in_calls(module: Module) -> list[str]:
    """Conditional expressions that are arguments of calls, where a reader overlooks them."""
    broken = []
    for node in module.nodes:
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(value, ast.IfExp) for value in values):
                broken.append(module.at(node, "chooses an argument inside of a call"))
    return broken


# --- sizes and types -------------------------------------------------------------------------------------


def oversize(module: Module) -> list[str]:
    count = len(module.source.splitlines())
    broken = [f"{module.name}: {count} lines"] if count >= FILE_LINES else []
    for node in module.nodes:
        if isinstance(node, Function):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size >= FUNCTION_LINES:
                broken.append(module.at(node, f"{node.name} has {size} lines"))
    return broken


def unannotated(module: Module) -> list[str]:
    """Public functions and methods that leave an argument or the result without a type."""
    if any(part.startswith("_") and not part.startswith("__") for part in module.name.split(".")):
        return []
    broken = []
    for function, is_method in public_functions(module.tree, in_class=False):
        spec = function.args
        static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
        arguments = [*spec.posonlyargs, *spec.args][is_method and not static :] + spec.kwonlyargs
        arguments += [a for a in (spec.vararg, spec.kwarg) if a is not None]
        missing = [a.arg for a in arguments if a.annotation is None]
        missing += ["the result"] if function.returns is None else []
        if missing:
            broken.append(module.at(function, f"{function.name} has no type for {', '.join(missing)}"))
    return broken


def public_functions(node: ast.AST, *, in_class: bool) -> Iterator[tuple[Function, bool]]:
    """Functions a user of the module can name, with whether each is a method; not those inside functions."""
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", "") or ""
        public = not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
        if isinstance(child, Function):
            if public:
                yield child, in_class
        elif isinstance(child, ast.ClassDef):
            if public:
                yield from public_functions(child, in_class=True)
        else:
            yield from public_functions(child, in_class=in_class)


def over_budget(modules: Modules) -> list[str]:
    """Sizes of the package that are above its budget."""
    lines = {name: len(module.source.splitlines()) for name, module in modules.items()}
    core = sum(count for name, count in lines.items() if room_of(name) not in RINGS)
    sizes = {"lines": sum(lines.values()), "files": len(lines), "lines of the core": core}
    return [f"{size} {name}, at most {BUDGET[name]}" for name, size in sizes.items() if size > BUDGET[name]]


def over_budget_of_tests(folder: Path) -> list[str]:
    """Sizes of a folder of tests that are above their budget."""
    lines = {path: len(path.read_bytes().splitlines()) for path in folder.rglob("*.py")}
    parts = [folder / "helpers", folder / "workers"]
    helpers = sum(count for path, count in lines.items() if path.parent in parts)
    sizes = {"tests": sum(lines.values()), "helpers and workers": helpers}
    return [
        f"{size} lines of {name}, at most {TEST_BUDGET[name]}"
        for name, size in sizes.items()
        if size > TEST_BUDGET[name]
    ]


TREE_RULES: list[Callable[[Modules], list[str]]] = [imports_going_up, import_cycles, over_budget]
MODULE_RULES: list[Callable[[Module], list[str]]] = [
    environment_reads,
    device_calls,
    unmarked_reads,
    unpickling,
    swallowed_exceptions,
    stubs,
    joined_assignments,
    conditions_in_calls,
    oversize,
    unannotated,
]


def broken_by(rule: Callable[..., list[str]], modules: Modules) -> list[str]:
    """Every place where `modules` break `rule`."""
    if rule in TREE_RULES:
        return rule(modules)
    return [place for module in modules.values() for place in rule(module)]
