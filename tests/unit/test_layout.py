"""The house rules: three folders are one package, who may import whom and what, how long a file may be, what errors do.

Reads the sources; runs only what shows which modules a start loads.
"""

import ast
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

import tlora
from tlora import errors
from tlora.spec import _Loader

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in ("tlora", "tlora/kernels", "tlora/actors")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name != "__init__.py"
}
SOURCES = [
    path
    for folder in ("tlora", "kernels", "actors", "examples", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Each may import its own layer and those below; a module not named here is a part: model, data, loss, optimizer, …
GROUND, KERNEL, PART, TRAINER, ACTOR, FRONT = range(6)
LAYERS = {
    "tlora.errors": GROUND,
    "tlora.randomness": GROUND,
    "tlora.trainer": TRAINER,
    "tlora.group_trainer": TRAINER,
    "tlora.local": TRAINER,
    "tlora.profiling": TRAINER,
    "tlora.halting": TRAINER,
    "tlora.sweep_run": TRAINER,
    "tlora.sweep_local": TRAINER,
    "tlora.console": FRONT,
    "tlora.client": FRONT,
    "tlora.cli": FRONT,
    "tlora.cli_cluster": FRONT,
    "tlora.cli_tools": FRONT,
    "tlora.__main__": FRONT,
}
DECIDING = (
    "scheduling policy placement sizing capacity simulate baselines replays traces report sweep sweep_spec sweep_state "
    "sweep_order sweep_simulate sweep_replay"
)
PURE = (*(f"tlora.{name}" for name in DECIDING.split()), "tlora.job", "tlora.errors", "tlora.plan")
RAY_TRAIN = "tlora.actors.ray_train"
UNSAFE = re.compile(
    r"(pickle|cloudpickle|dill|joblib|marshal|shelve)(\..*)?|torch\.load|yaml\.(unsafe|full)_load(_all)?"
    r"|os\.(system|popen)|eval|exec|(shell|allow_pickle)=True"
)
HEAVY = {"torch", "transformers", "ray", "triton", "peft", "datasets", "wandb"}


def layer(module: str) -> int:
    if module.startswith("tlora.kernels."):
        return KERNEL
    return ACTOR if module.startswith("tlora.actors.") else LAYERS.get(module, PART)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def named(node: ast.AST) -> Iterator[str]:
    """The modules an import statement names, `from tlora import errors` as tlora.errors."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import"
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from [name for name in submodules if name in MODULES] or [str(node.module)]


def at_start(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not those of functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(node):
        for_checkers = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not for_checkers and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_start(child)


@cache
def imports(module: str) -> frozenset[str]:
    return frozenset(name for node in ast.walk(tree(MODULES[module])) for name in named(node))


@cache
def imports_at_start(module: str) -> frozenset[str]:
    return frozenset(name for node in at_start(tree(MODULES[module])) for name in named(node))


def loads(module: str) -> set[str]:
    """Top-level packages that importing a module brings in, through our own modules too."""
    seen, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += imports_at_start(name) if name in MODULES else []
    return {name.partition(".")[0] for name in seen}


def after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after running `code`."""
    shown = f"{code}\nimport sys; print('loaded:', *({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("name", ["kernels", "actors"])
def test_folder_is_linked_into_the_package(name: str) -> None:
    assert os.readlink(ROOT / "tlora" / name) == f"../{name}"
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("folder", ["kernels", "actors", "tests"])
def test_folder_hides_no_package_of_its_name(folder: str) -> None:
    assert not list((ROOT / folder).rglob("__init__.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_our_folders_are_imported_through_the_package(path: Path) -> None:
    wrong = {name for node in ast.walk(tree(path)) for name in named(node)}
    assert not {name for name in wrong if name.partition(".")[0] in ("kernels", "actors")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    ours = {name for name in imports(module) if name in MODULES}
    assert not {name for name in ours if layer(name) > layer(module)}


@pytest.mark.parametrize("module", MODULES)
def test_triton_and_ray_stay_in_their_folders(module: str) -> None:
    used = {name.partition(".")[0] for name in imports(module)}
    used_at_start = {name.partition(".")[0] for name in imports_at_start(module)}
    assert "triton" not in used or layer(module) == KERNEL
    assert "ray" not in used or layer(module) >= ACTOR
    assert "ray" not in used_at_start or layer(module) == ACTOR


def unsafe(source: ast.AST) -> list[str]:
    """What runs what it reads: unpicklers, YAML of any type, shells."""
    found = []
    for node in ast.walk(source):
        words = list(named(node))
        if isinstance(node, ast.ImportFrom):
            words += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            words.append(ast.unparse(node.func))
            words += [f"{each.arg}={ast.unparse(each.value)}" for each in node.keywords]
            if words[0] == "yaml.load" and ast.unparse(node.args[-1]) not in ("_Loader", "yaml.SafeLoader"):
                words.append("yaml.unsafe_load")
        found += [word for word in words if UNSAFE.fullmatch(word)]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_is_read_is_run(module: str) -> None:
    assert not unsafe(tree(MODULES[module]))
    assert issubclass(_Loader, yaml.SafeLoader)


@pytest.mark.parametrize(
    "planted",
    ["import pickle", "from pickle import loads", "torch.load(path)", "from torch import load", "os.system(text)",
     "yaml.load(text, yaml.Loader)", "yaml.load(text, Loader=yaml.Loader)", "yaml.unsafe_load(text)",
     "subprocess.run(text, shell=True)", "np.load(path, allow_pickle=True)", "eval(text)"],
)  # fmt: skip
def test_a_planted_reader_that_runs_is_seen(planted: str) -> None:
    assert unsafe(ast.parse(planted))


@pytest.mark.parametrize("module", MODULES)
def test_one_module_alone_knows_the_insides_of_ray_train(module: str) -> None:
    assert module == RAY_TRAIN or not {name for name in imports(module) if name.startswith("ray.train.v2")}


def test_the_insides_of_another_ray_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.__version__", "2.61.0")
    spec = spec_from_file_location("another", MODULES[RAY_TRAIN])
    with pytest.raises(ImportError, match=r"made for Ray 2\.60: got 2\.61\.0"):
        spec.loader.exec_module(module_from_spec(spec))


@pytest.mark.parametrize("module", [module for module in PURE if module in MODULES])
def test_decisions_need_neither_torch_nor_ray(module: str) -> None:
    assert not loads(module) & {"torch", "ray"}
    assert not {name.partition(".")[0] for name in imports(module)} & {"torch", "ray"}


@pytest.mark.parametrize("name", ["capacity", "placement", "policy", "scheduling", "sizing", "sweep_order"])
def test_decisions_about_places_have_no_clock(name: str) -> None:
    assert not {name.partition(".")[0] for name in imports(f"tlora.{name}")} & {"time", "datetime"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    kernels = [f for f in functions if any("triton.jit" in ast.unparse(mark) for mark in f.decorator_list)]
    long = {f.name: length for f in functions if (length := (f.end_lineno or 0) - f.lineno + 1) > 60}
    assert not long.keys() - {kernel.name for kernel in kernels}, long


@pytest.mark.parametrize(
    "error", [value for value in vars(errors).values() if isinstance(value, type)], ids=lambda error: error.__name__
)
def test_error_pickles_and_is_also_a_standard_one(error: type[errors.TloraError]) -> None:
    back = pickle.loads(pickle.dumps(error("job a: stopped.")))
    assert type(back) is error
    assert str(back) == "job a: stopped."
    standard = {base for base in error.__mro__ if base.__module__ == "builtins"} - {Exception, BaseException, object}
    assert standard or error is errors.TloraError


def test_import_is_light() -> None:
    assert after("import tlora, tlora.errors, tlora.spec") == set()


def test_help_is_light() -> None:
    cli = "from typer.testing import CliRunner; from tlora.cli import app"
    assert after(f"{cli}\nassert CliRunner().invoke(app, ['--help']).exit_code == 0") == set()


@pytest.mark.parametrize("name", tlora.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(tlora, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        tlora.Trainr  # noqa: B018
