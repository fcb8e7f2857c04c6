"""The package's own source, for tests that read it rather than run it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch_cascade

ROOT = Path(torch_cascade.__file__).parent
NOT_THE_PACKAGE = ("tests", "benchmarks", "build", "dist")


@dataclass(frozen=True)
class Module:
    """One module: its dotted name below torch_cascade ("" for the root) and its file."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    @property
    def lines(self) -> int:
        return len(self.path.read_text(encoding="utf-8").splitlines())

    def imports(self, *, on_import_only: bool = False) -> Iterator[str]:
        """Full dotted names of what it imports; `from a import b` gives `a.b`.

        `on_import_only` leaves out what runs later or never: functions, TYPE_CHECKING blocks.
        """
        for node in _on_import(self.tree) if on_import_only else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages() -> list[Path]:
    """Every folder of the package, the root first."""
    inits = (p for p in ROOT.glob("*/**/__init__.py") if _belongs(p))
    return [ROOT, *sorted(p.parent for p in inits)]


def modules() -> list[Module]:
    """Every module of the package."""
    files = [f for package in packages() for f in sorted(package.glob("*.py"))]
    return [Module(_dotted(f), f) for f in files]


def _belongs(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[0] not in NOT_THE_PACKAGE and not any(part.startswith(".") for part in parts)


def _dotted(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _on_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if function or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        yield node
        yield from _on_import(node)
