"""Who may import whom. The numbers stand here and nowhere else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import graven

PACKAGE = Path(graven.__file__).parent

# A part imports strictly lower numbers, or its own folder's `base`. Parts that do not exist yet have theirs already. The files of a folder
# that has steps of its own are numbered too.
LAYER = {
    "errors": 0,
    "shapes": 1,
    "settings": 1,
    "report": 1,
    "processes": 1,
    "ops": 2,
    "ops.inner_loop": 2.1,
    "theory": 2,
    "tasks": 2,
    "tasks.stories": 2.1,
    "tasks.babi": 2.2,
    "layers": 3,
    "layers.ttt": 3.1,
    "layers.lact": 3.1,
    "decoding": 3,
    "lm": 4,
    "lm.pretrained": 4.1,
    "construct": 4,
    "memory": 5,
    "memory.rules": 4.9,
    "memory.kinds": 5.1,
    "memory.several": 5.2,
    "memory.file": 5.1,
    "memory.adapted": 5.1,
    "audit": 5,
    "audit.polynomial": 5.1,
    "audit.dimension": 5.1,
    "audit.prune": 5.1,
    "audit.kernel": 5.2,
    "audit.checkpoint": 5.3,
    "audit.merge": 5.3,
    "audit.world": 5.3,
    "audit.polish": 5.3,
    "audit.scores": 5.3,
    "audit.report": 5.4,
    "audit.readings": 5.5,
    "audit.explain": 5.6,
    "cost": 6,
    "measure": 6,
    "engrave": 6,
    "answer": 6,
    "study": 6,
    "training": 6.5,
    "train": 7,
    "train_triples": 7.5,
    "fit": 7,
    "distill": 7,
    "fidelity": 7,
    "models": 8,
    "run": 8,
    "model": 9,
    "exchange": 9.5,
    "exchange.importing": 9.6,
    "exchange.exporting": 9.6,
    "demo": 10,
    "doctor": 10,
    "quantize": 10,
    "written": 10,
    "several": 10.2,
    "folder": 10.2,
    "many": 10.3,
    "verbs": 10.5,
    "cli": 11,
    "server": 11,
}
FILES = sorted(str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", ".") for path in PACKAGE.rglob("*.py"))
PACKAGES = [name for name in FILES if name.endswith(".__init__")]
FILES = [name for name in FILES if name not in PACKAGES]
LIGHT = [name for name in ("graven", "graven.errors", "graven.report", "graven.cli") if name in FILES or name == "graven"]


def imported(tree: ast.AST) -> set[str]:
    """Every module that a syntax tree imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from graven import settings` imports a part, and so does `from graven.lm import small`
            names |= {f"{module}.{alias.name}" if module == "graven" else module for alias in node.names}
    return names


def part(module: str) -> str:
    """`ops` of `graven.ops.attention`."""
    return module.split(".")[1]


def number(module: str) -> float:
    """Of a file that has one, or of its part."""
    return LAYER.get(module.removeprefix("graven."), LAYER[part(module)])


def climbs(module: str, other: str) -> bool:
    """True where `module` may not import `other`."""
    if other.startswith("."):
        return True  # a relative import hides which part it means
    if not other.startswith("graven."):
        return False
    own_base = ".".join([*module.split(".")[:-1], "base"])
    return other != own_base and number(other) >= number(module)


def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE.parent / (module.replace(".", "/") + ".py")).read_text())


def computes(node: ast.stmt) -> bool:
    """True for a statement that an `__init__.py` should not hold."""
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    names = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    late = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"  # a re-export that is imported when it is asked for
    for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not any(map(computes, node.body))
    return not (docstring or names or late or for_types or isinstance(node, ast.Import | ast.ImportFrom))


@pytest.mark.parametrize("module", FILES)
def test_a_part_imports_only_what_lies_below_it(module):
    assert [other for other in sorted(imported(tree_of(module))) if climbs(module, other)] == []


@pytest.mark.parametrize("module", FILES)
def test_no_part_imports_experiments_benchmarks_or_tests(module):
    assert not {name.split(".")[0] for name in imported(tree_of(module))} & {"experiments", "benchmarks", "tests"}


@pytest.mark.parametrize(
    ("module", "source", "refused"),
    [
        ("graven.ops.attention", "from graven.layers.decoder import Decoder", True),
        ("graven.ops.attention", "def f():\n    import graven.cli", True),
        ("graven.ops.attention", "from graven.ops.delta import delta", True),
        ("graven.ops.attention", "from . import delta", True),
        ("graven.lm.small", "from graven.lm.pretrained import Pretrained", True),
        ("graven.report", "from graven import settings", True),
        ("graven.audit.prune", "from graven.audit.dimension import groups", True),
        ("graven.lm.small", "from graven.lm.base import greedy", False),
        ("graven.layers.decoder", "from graven.ops.attention import attention", False),
        ("graven.layers.decoder", "import torch", False),
    ],
)
def test_an_import_that_climbs_is_seen(module, source, refused):
    assert any(climbs(module, other) for other in imported(ast.parse(source))) == refused


@pytest.mark.parametrize("module", PACKAGES)
def test_a_package_only_re_exports(module):
    assert [ast.unparse(node) for node in tree_of(module).body if computes(node)] == []


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ('"""Names."""\nfrom a import b\n__all__ = ["b"]', False),
        ("if TYPE_CHECKING:\n    f()", True),
        ("b = 1", True),
        ("def f(): ...", True),
        ("f()", True),
    ],
)
def test_a_package_that_computes_is_seen(source, refused):
    assert any(computes(node) for node in ast.parse(source).body) == refused


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_starts_without_torch_and_transformers(module):
    heavy = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_report_is_made_without_torch(tmp_path):
    source = (
        "import sys; from pathlib import Path; from graven.report import *\n"
        f"place = Path({str(tmp_path)!r})\n"
        "write_lines(place / 'rows.jsonl', [{'a': 1, 'b': 2}])\n"
        "table(read_lines(place / 'rows.jsonl'), row='a', column='b', value=str)\n"
        "with figure(place / 'f.png') as axes: axes[0].plot([1, 2])\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "False\n"
