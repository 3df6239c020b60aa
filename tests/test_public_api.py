"""What users import: the names stay, and importing them stays cheap.

A name that vanishes breaks users; a heavy module that creeps into an import makes `--help` take
seconds and a deployment need torch.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qwen3vl_export
import qwen3vl_runtime
from qwen3vl_export import errors

_REPOSITORY = Path(__file__).parents[1]
_HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "tensorrt")
_MODULES = sorted(
    path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for root in (_REPOSITORY / name for name in ("export", "runtime", "calibration", "tools"))
    for path in root.rglob("*.py")
)


def test_names_of_the_runtime() -> None:
    assert sorted(qwen3vl_runtime.__all__) == [
        "GenerationResult",
        "GenerationTiming",
        "ORTRunner",
        "SamplingParams",
        "StreamChunk",
    ]


def test_names_of_the_export() -> None:
    assert sorted(qwen3vl_export.__all__) == [
        "Bundle",
        "ModelConfig",
        "Qwen3VLError",
        "TextConfig",
        "VisionConfig",
        "__version__",
    ]


@pytest.mark.parametrize("package", [qwen3vl_export, qwen3vl_runtime])
def test_every_public_name_is_there_and_nothing_else_is(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert all(hasattr(package, name) for name in names)
    defined = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and isinstance(value, type)
    }
    assert defined == {name for name in names if not name.startswith("_")}


def test_every_error_is_one_that_the_command_line_prints() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.Qwen3VLError)
    cause = ImportError("no module", name="torch")
    message = str(errors.MissingExtraError("`export`", "export", cause))
    assert "pip install 'qwen3vl-export[export]'" in message


@pytest.mark.parametrize("module", _MODULES)
def test_every_module_names_what_it_exports(module: str) -> None:
    """`__all__` holds, once and in order, only names that are there."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} does not say why it exists"
    exported: list[str] = []
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["__all__"]:
                exported = ast.literal_eval(node.value)
            defined.update(names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
    assert set(exported) <= defined
    assert len(set(exported)) == len(exported)
    assert exported == sorted(exported, key=_ruff_order)


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as ruff sorts `__all__`."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


def modules_after(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a program."""
    code = f"{program}\nimport json, sys\nprint('\\n' + json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


_HELP = """
import sys
from qwen3vl_tools.cli import main
for arguments in ([], ["export"], ["run"], ["inspect"], ["demo"]):
    try:
        main([*arguments, "--help"])
    except SystemExit:
        pass
"""


@pytest.mark.parametrize(
    "program",
    [
        "import qwen3vl_export",
        "import qwen3vl_runtime",
        "import qwen3vl_export.bundle, qwen3vl_export.contract, qwen3vl_export.errors",
        "import qwen3vl_tools.cli, qwen3vl_tools.tiny",
        _HELP,
    ],
    ids=["export", "runtime", "light-modules", "tools", "help"],
)
def test_imports_are_light(program: str) -> None:
    assert modules_after(program) & set(_HEAVY) == set()


def test_help_does_not_even_load_numpy() -> None:
    loaded = modules_after(_HELP)
    assert "qwen3vl_tools" in loaded
    assert loaded & {"numpy", "PIL", "tokenizers", "jinja2"} == set()


def test_every_module_of_the_runtime_is_free_of_torch() -> None:
    runtime = [name for name in _MODULES if name.startswith("qwen3vl_runtime")]
    assert len(runtime) > 15
    loaded = modules_after("\n".join(f"import {name}" for name in runtime))
    assert "onnxruntime" in loaded
    assert loaded & (set(_HEAVY) - {"onnxruntime"}) == set()
