"""Finds recipes: top-level functions annotated `-> Experiment`.

Files are *parsed* to list recipes and only the file of the one that is wanted is imported, so that listing needs no jax
and a command on one recipe never waits for the imports of the others.

    configs/recsys/dlrm.py:flights      is `dlrm-flights`; the first recipe of a file is also the bare stem, `dlrm`
    some.module:function                any importable module
    path/to/mine.py:function            a user's own file; without `:function` its first recipe

Functions with a leading underscore, with parameters that have no default, or with another annotation are no recipes.
`-` and `_` are the same in short names.
"""

import ast
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import pathlib
import sys
import traceback
import types
from typing import TYPE_CHECKING

from scalejax.errors import UserError

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment

_PACKAGE = "scalejax.configs"
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe, known from the text of its file; nothing of it is imported yet.

    Attributes:
      name: How a command line names it: `dlrm-flights`, `module:function` or `path.py:function`.
      path: File that defines it.
      module: Dotted module to import, or None for a file of the user.
      function: Name of the function.
      first: Whether it is the first recipe of its file.
      summary: First line of its docstring, else of the file's.
    """

    name: str
    path: pathlib.Path
    module: str | None
    function: str
    first: bool
    summary: str

    @property
    def slug(self) -> str:
        """A short name that can be part of a file name: `dlrm-flights`."""
        return f"{self.path.stem}-{self.function}"

    def sha256(self) -> str | None:
        """Hex digest of a user's file; None for a recipe of an installed module, which its version identifies."""
        return None if self.module else hashlib.sha256(self.path.read_bytes()).hexdigest()

    def build(self) -> "Experiment":
        """Imports the file and calls the function.

        Raises:
          UserError: a user's file fails while it is imported or called, or returns something else than an Experiment.
        """
        if self.module is not None:
            experiment = getattr(importlib.import_module(self.module), self.function)()
        else:
            try:
                experiment = getattr(_import_file(self.path), self.function)()
            except Exception as error:  # Any mistake in a user's file is the user's, whatever its type.
                raise UserError(_describe_failure(self.path, error)) from error
        from scalejax.train.experiment import Experiment

        if type(experiment) is not Experiment:
            raise UserError(
                f"Recipe {self.name!r}: must return a scalejax.train.experiment.Experiment; got "
                f"{type(experiment).__name__}. Return Experiment(model=..., data=..., steps=...)."
            )
        return experiment


def listing() -> list[Recipe]:
    """All recipes of the package, by family and file; the first of each file comes first. Imports nothing."""
    found = []
    for path in sorted(_FOLDER.glob("*/*.py")):
        if not path.name.startswith("_"):
            module = f"{_PACKAGE}.{path.parent.name}.{path.stem}"
            found += _recipes_of(path, module=module, prefix=None)
    return found


def is_bundled(recipe: str) -> bool:
    """Whether a text names a recipe of this package, decided without importing or opening what it names.

    A short name does, and `scalejax.configs.FAMILY.FILE:FUNCTION`; every other module, and every path, is a user's.
    """
    if ":" not in recipe and not recipe.endswith(".py"):
        return True
    return recipe in {f"{one.module}:{one.function}" for one in listing()}


def find(recipe: str) -> Recipe:
    """Finds one recipe by short name, `module:function`, `path.py:function` or `path.py`.

    Raises:
      UserError: nothing of that name, or several things; names the nearest.
    """
    head, colon, function = recipe.rpartition(":")
    if not colon:
        head, function = recipe, ""
    if head.endswith(".py"):
        return _find_in_file(pathlib.Path(head), function)
    if colon:
        return _find_in_module(head, function)
    return _find_short(recipe)


def _find_short(name: str) -> Recipe:
    recipes = listing()
    wanted = _plain(name)
    matches = [r for r in recipes if _plain(r.name) == wanted or (r.first and _plain(r.path.stem) == wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        exact = " or ".join(f"{r.module}:{r.function}" for r in matches)
        raise UserError(f"Recipe {name!r} is ambiguous: it names {len(matches)} recipes. Say {exact}.")
    names = {_plain(r.name): r.name for r in recipes} | {_plain(r.path.stem): r.path.stem for r in recipes if r.first}
    if pathlib.Path(f"{name}.py").is_file():
        hint = f" A file {name}.py is here: say {name}.py or {name}.py:function."
    else:
        hint = " A file of your own is given as path.py:function."
    raise UserError(
        f"Unknown recipe {name!r}.{_nearest(wanted, names)} `scalejax recipes` lists all {len(recipes)}.{hint}"
    )


def _find_in_module(module: str, function: str) -> Recipe:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UserError(
            f"Recipe '{module}:{function}': there is no importable module {module!r}. Give a dotted module that Python "
            "can import, or the file itself as path.py:function."
        )
    return _pick(_recipes_of(pathlib.Path(spec.origin), module=module, prefix=module), module, function)


def _find_in_file(path: pathlib.Path, function: str) -> Recipe:
    if not path.is_file():
        raise UserError(
            f"Recipe file {str(path)!r} does not exist (looked in {pathlib.Path.cwd()}). Give a Python file "
            "with a function annotated `-> Experiment`."
        )
    return _pick(_recipes_of(path, module=None, prefix=str(path)), str(path), function)


def _pick(recipes: list[Recipe], where: str, function: str) -> Recipe:
    if not recipes:
        raise UserError(
            f"{where} has no recipe. A recipe is a public function without arguments annotated `-> Experiment`: "
            "`def mine() -> Experiment: ...`."
        )
    if not function:
        return recipes[0]
    for recipe in recipes:
        if recipe.function == function:
            return recipe
    names = {_plain(r.function): r.function for r in recipes}
    raise UserError(
        f"{where} has no recipe {function!r}.{_nearest(_plain(function), names)} It has: {', '.join(names.values())}."
    )


def _recipes_of(path: pathlib.Path, *, module: str | None, prefix: str | None) -> list[Recipe]:
    """Recipes of one file in the order of the text."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise UserError(_describe_syntax_error(path, error)) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the text
        raise UserError(f"Recipe file {path}: cannot be read as Python: {error}.") from error
    functions: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _is_recipe(node):
            if node.name in functions:
                raise UserError(
                    f"{path}: recipe {node.name!r} is ambiguous: it is defined in line {functions[node.name].lineno} "
                    f"and again in line {node.lineno}. Rename one of them."
                )
            functions[node.name] = node
    file_summary = _first_line(ast.get_docstring(tree))
    return [
        Recipe(
            name=f"{path.stem}-{name}" if prefix is None else f"{prefix}:{name}",
            path=path,
            module=module,
            function=name,
            first=position == 0,
            summary=_first_line(ast.get_docstring(node)) or file_summary,
        )
        for position, (name, node) in enumerate(functions.items())
    ]


def _is_recipe(node: ast.FunctionDef) -> bool:
    required = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    required += sum(default is None for default in node.args.kw_defaults)
    returns = node.returns
    if isinstance(returns, ast.Constant) and isinstance(returns.value, str):  # quoted
        name = returns.value.rpartition(".")[2]
    else:
        name = _last_name(returns)
    return not node.name.startswith("_") and required == 0 and name == "Experiment"


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0].strip()


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def _nearest(wanted: str, names: dict[str, str]) -> str:
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    return f" Nearest: {', '.join(names[c] for c in close)}." if close else ""


def _import_file(path: pathlib.Path) -> types.ModuleType:
    """Executes a user's file as a module; its folder goes to the end of sys.path, so that it may import neighbours."""
    name = f"scalejax_recipe_{path.stem}"  # without the folder: the name is part of saved experiments
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _describe_syntax_error(path: pathlib.Path, error: SyntaxError) -> str:
    text = f": {error.text.strip()}" if error.text else ""
    return (
        f"Recipe file {path}, line {error.lineno}: {error.msg}{text}. Correct the file; `python {path}` shows it too."
    )


def _describe_failure(path: pathlib.Path, error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return _describe_syntax_error(path, error)
    lines = [
        f.lineno
        for f in traceback.extract_tb(error.__traceback__)
        if pathlib.Path(f.filename).resolve() == path.resolve()
    ]
    where = f"{path}, line {lines[-1]}" if lines else str(path)
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"Recipe file {where}: {kind}{error}"
