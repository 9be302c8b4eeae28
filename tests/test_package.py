"""The six folders ship as one import package: what the wheel holds, what imports what, what the README promises."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftheads.eval import cli

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["recipes", "heads", "inference", "data", "train", "eval"]


def sources() -> list[Path]:
    """Every file of the six folders that belongs to the package, relative to the root."""
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return sorted(p.relative_to(ROOT) for p in found if not p.name.startswith("."))


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=os.environ | env)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the sources alone: an older build/ or egg-info beside the checkout would leak into the result."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in [*sources(), Path("pyproject.toml"), Path("README.md"), Path("LICENSE")]:
        goal = folder / "src" / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, goal)
    done = python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(folder / "src"))
    assert done.returncode == 0, done.stderr
    return next(folder.glob("draftheads-*.whl"))


def test_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {n for n in names if ".dist-info/" not in n}
    assert code == {f"draftheads/{p.as_posix()}" for p in sources()}
    assert {n.split("/")[0] for n in code} == {"draftheads"}, "anything else would land in site-packages under a name like data or train"
    metadata = {n.rsplit("/", 1)[1]: n for n in names - code if "licenses" not in n}
    scripts = zipfile.ZipFile(wheel).read(metadata["entry_points.txt"]).decode()
    assert "specdec = draftheads.eval.cli:main" in scripts
    assert any(n.endswith("/LICENSE") for n in names)


def test_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import importlib.resources as r, draftheads.recipes.schema as s; print(s.__file__);"
        "recipes = sorted(p.name for p in r.files('draftheads.recipes').iterdir() if p.name.endswith('.yaml')); print(recipes);"
        "print(sum(p.name.endswith('.jsonl') for p in r.files('draftheads.data.prompts').iterdir()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    place, recipes, prompts = done.stdout.splitlines()
    assert place.startswith(str(tmp_path))
    assert "smollm2-135m.yaml" in recipes
    assert int(prompts) == len(list((ROOT / "data/prompts").glob("*.jsonl")))


def test_every_folder_with_code_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {"draftheads." + ".".join(p.parent.parts) for p in sources() if p.suffix == ".py"}
    assert folders == listed
    assert all((ROOT / folder / "py.typed").is_file() for folder in FOLDERS)


def test_imports_go_one_way() -> None:
    pytest.importorskip("importlinter")
    done = python("-c", "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_bare_imports_of_our_own_folders() -> None:
    """`import heads` works from the checkout and makes a second copy of every class."""
    bad = []
    for path in [*(ROOT / p for p in sources() if p.suffix == ".py"), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else ["relative import"]
            bad += [f"{path.relative_to(ROOT)}: {n}" for n in names if n.split(".")[0] in {*FOLDERS, "relative import"}]
    assert not bad


def test_no_entry_file_hides_another_module() -> None:
    """Running train/eagle.py puts train/ first on sys.path: a train/logging.py would replace the standard one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [re.split(r"[<>=!\[; ]", d)[0] for d in sum(project["optional-dependencies"].values(), project["dependencies"])]
    taken = sys.stdlib_module_names | {w.replace("-", "_").lower() for w in wanted} | {"yaml", "PIL", "tqdm", "tokenizers"}
    assert not taken & {p.stem for p in (ROOT / "train").iterdir() if p.name != "__init__.py"}


def test_command_line_starts_without_torch() -> None:
    code = "import sys, draftheads.eval.cli; print([m for m in ('torch', 'transformers', 'accelerate', 'datasets') if m in sys.modules])"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def readme_commands() -> list[list[str]]:
    """The commands of the README's code blocks and tables, as words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.S | re.M)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()] + re.findall(r"`([^`\n]+)`", text)
    return [line.split("#")[0].split() for line in lines if re.match(r"(specdec|specdec-eval|make|accelerate launch) ", line)]


def test_readme_commands_exist() -> None:
    commands = readme_commands()
    assert ["make", "quickstart"] in commands
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands:
        missing = [w for w in words if w.startswith(("recipes/", "train/")) and not (ROOT / w).is_file()]
        if words[0] == "make":
            missing += [w for w in words[1:] if "=" not in w and not re.search(rf"^{re.escape(w)}:", makefile, re.M)]
        elif words[0].startswith("specdec"):
            app, path = (cli.app, words[1:2]) if words[0] == "specdec" else (cli.eval_app, [])
            shown = CliRunner().invoke(app, [*path, "--help"])
            assert shown.exit_code == 0, f"{words}: {shown.output}"
            missing += [w for w in words if w.startswith("--") and w not in shown.output]
        assert not missing, f"README shows `{' '.join(words)}`, but there is no {missing}"
