"""README.md against the code: generated sections are current, and what it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import contract_markdown
from qwen3vl_tools import readme
from qwen3vl_tools.cli import _make_parser
from qwen3vl_tools.tiny import CHECKPOINT_DIR

_REPOSITORY = Path(__file__).parents[1]
_README = _REPOSITORY / "README.md"
_REGENERATE = "README.md is out of date; run: python -m qwen3vl_tools.readme README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return _README.read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    parts = re.findall(f"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", text, re.DOTALL)
    assert len(parts) == 1, f"README.md must have one section {name}:begin ... {name}:end"
    return str(parts[0])


def test_the_contract_tables_are_those_of_the_bundled_checkpoint(text: str) -> None:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text(encoding="utf-8"))
    expected = contract_markdown(ModelConfig.from_dict(config)).strip()
    assert section(text, "contract").strip() == expected, _REGENERATE


def test_the_tree_lists_every_module(text: str) -> None:
    listed = [line.split()[0] for line in section(text, "tree").splitlines() if "/" in line]
    found = [
        path.relative_to(_REPOSITORY).as_posix()
        for root in ("export", "runtime", "calibration", "tools")
        for path in (_REPOSITORY / root).rglob("*.py")
    ]
    assert sorted(listed) == sorted(found), _REGENERATE


def test_generated_sections_are_current(text: str) -> None:
    assert readme.update(text, _REPOSITORY) == text, _REGENERATE


def test_a_stale_section_is_made_anew(text: str) -> None:
    stale = text.replace("`pixel_values`", "`pixels`")
    assert stale != text
    assert readme.update(stale, _REPOSITORY) == text


def test_every_flag_it_names_exists(text: str) -> None:
    """A flag that the command line does not know makes a copied command fail."""
    known = set(re.findall(r"--[a-z][a-z-]+", _help_of_all_commands()))
    foreign = {"--upgrade", "--constraint", "--editable", "--preset", "--layers"}
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert shown, "README.md shows no flag"
    assert shown - known - foreign == set()


def test_every_local_link_leads_somewhere(text: str) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert [link for link in links if not (_REPOSITORY / link).exists()] == []


def _help_of_all_commands() -> str:
    parser = _make_parser()
    texts = [parser.format_help()]
    for action in parser._actions:
        choices = action.choices if isinstance(action.choices, dict) else {}
        texts += [command.format_help() for command in choices.values()]
    return "\n".join(texts)
