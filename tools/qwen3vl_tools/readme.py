"""Generates the parts of README.md that repeat the code: the contract tables and the tree.

Usage: `python -m qwen3vl_tools.readme README.md`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import contract_markdown
from qwen3vl_tools.tiny import CHECKPOINT_DIR

__all__ = ["update"]

_ROOTS = ("export", "runtime", "calibration", "tools")


def update(readme: str, repository: Path) -> str:
    """The README's text with its generated sections made anew."""
    sections = {"contract": _contract(), "tree": _tree(repository)}
    for name, content in sections.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        section = f"{begin}\n{content}\n{end}"
        readme = pattern.sub(lambda _, section=section: section, readme)  # type: ignore[misc]
    return readme


def _contract() -> str:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text(encoding="utf-8"))
    return contract_markdown(ModelConfig.from_dict(config)).strip()


def _tree(repository: Path) -> str:
    """Every module with the first line of its docstring."""
    lines = ["```"]
    for root in _ROOTS:
        paths = sorted((repository / root).rglob("*.py"), key=lambda path: path.parts)
        for path in paths:
            name = path.relative_to(repository).as_posix()
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            lines.append(f"{name:<50} {docstring.splitlines()[0].rstrip('.')}")
    return "\n".join([*lines, "```"])


def main() -> int:
    """Rewrite the README given as the only argument."""
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8"), path.parent), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
