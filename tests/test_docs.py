# SPDX-License-Identifier: Apache-2.0
"""What the docs say is run.

Python blocks of a page are one script, run in a folder of its own. A ``text`` block after ``<!-- output -->`` is what
the block before it must print. ``<!-- no-run: reason -->`` before a block leaves it out. Shell lines that begin with
``etude`` must name commands and flags that exist; those of the start page are run. YAML must be settings of PPO.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from PIL import Image
from preloaded import Preloaded

from etude.algorithms import BCConfig, PPOConfig, Stop
from etude.cli.data import COMMANDS as DATA_COMMANDS
from etude.cli.main import COMMANDS
from etude.settings import from_dict

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
_BLOCK = "\x00block "


class Block(NamedTuple):
    kind: str
    code: str
    mark: str
    line: int
    """Of its fence, from 1."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["kind"], m["code"], m["mark"] or "", text.count("\n", 0, m.start("kind")) + 1)
        for m in _FENCE.finditer(text)
    ]


def script_of(found: list[Block]) -> str:
    """The blocks as one script whose lines have the numbers that they have on the page."""
    lines: list[str] = []
    for i, block in enumerate(found):
        if block.kind == "python" and not block.mark.startswith("no-run"):
            lines += [""] * (block.line - 1 - len(lines))
            lines += [f"print('\\0block {i}')", *block.code.splitlines()]
    return "\n".join(lines)


def run(preloaded: Preloaded, folder: Path, program: str | Path, *args: str) -> str:
    done = preloaded.run(program, *args, cwd=folder)
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


_OF_RAY = re.compile(r"engine=.?.?ray|etude\.ray|import ray|Ray\(|tune\(|tuned\(")


def runnable(path: Path, code: str) -> Any:
    """A page or example as a parameter; those that start Ray are of the suite of the ray engine."""
    return pytest.param(path, marks=[pytest.mark.cluster] if _OF_RAY.search(code) else [])


RUNNABLE = [runnable(page, script) for page in PAGES if (script := script_of(blocks(page)))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=id_of)
def test_python_on_page_runs_and_prints_what_the_page_shows(page: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    found = blocks(page)
    script = tmp_path / "page.py"
    script.write_text(script_of(found))
    printed = {}
    for part in run(preloaded, tmp_path, script).split(_BLOCK)[1:]:
        number, _, output = part.partition("\n")
        printed[int(number)] = output.strip()
    shown = {
        f"line {block.line}": (i - 1, block.code.strip()) for i, block in enumerate(found) if block.mark == "output"
    }
    assert {line: printed[i] for line, (i, _) in shown.items()} == {line: code for line, (_, code) in shown.items()}


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_marks_give_reasons(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for mark in re.findall(r"<!-- (no-run.*?) -->", text):
        assert re.fullmatch(r"no-run: .{10,}", mark), mark
    assert text.count("<!-- output -->") == sum(block.mark == "output" for block in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        assert target.startswith("http") or (page.parent / target).exists(), target


def shell_lines(page: Path) -> list[list[str]]:
    text = "".join(block.code for block in blocks(page) if block.kind == "sh").replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("etude ")]


LINES = [(page, words) for page in PAGES for words in shell_lines(page)]


@pytest.mark.parametrize(("page", "words"), LINES, ids=lambda x: " ".join(x) if isinstance(x, list) else id_of(x))
def test_shell_line_names_what_exists(page: Path, words: list[str], helps: dict[str, str]) -> None:
    if words[1].startswith("--"):
        assert words[1] in ("--help", "--version")
        return
    assert words[1] in COMMANDS
    depth = 3 if words[1] in ("train", "data", "tune", "sweep") else 2
    if words[1] == "data":
        assert words[2] in DATA_COMMANDS
    name = " ".join(words[1:depth])
    known = set(re.findall(r"--[\w.-]+", helps[name if name in helps else "train ppo"])) | {"--help", "--help-all"}
    for flag in words[depth:]:
        if flag.startswith("--") and not flag.startswith("--space."):  # followed by any setting
            assert flag.partition("=")[0] in known, f"{flag} is no flag of etude {name}"


@pytest.fixture(scope="module")
def helps(preloaded: Preloaded) -> dict[str, str]:
    """The help of each command."""
    code = (
        "import contextlib, io, json, sys\nfrom etude.cli.main import main\nout = {}\n"
        "for name in sys.argv[1:]:\n    text = io.StringIO()\n"
        "    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):\n"
        "        main([*name.split(), '--help-all'])\n    out[name] = text.getvalue()\nprint(json.dumps(out))"
    )
    names = [
        "presets",
        "train ppo",
        "train a2c",
        "train impala",
        "train appo",
        "train bc",
        "train marwil",
        "train iql",
        "train awac",
        "train cql",
        "train td3_bc",
        "train decision_transformer",
        "train dqn",
        "train qr_dqn",
        "train sac",
        "train td3",
        "tune ppo",
        "sweep ppo",
        "record",
        "watch",
        "evaluate",
        "plot",
        "show",
        "export",
        "serve",
        "compare",
        "demo",
        *(f"data {name}" for name in DATA_COMMANDS),
    ]
    return dict(yaml.safe_load(run(preloaded, ROOT, code, *names)))


@pytest.mark.slow
def test_shell_lines_of_the_start_page_run(tmp_path: Path, preloaded: Preloaded) -> None:
    page = ROOT / "docs" / "index.md"
    assert len(shell_lines(page)) > 5
    for words in shell_lines(page):
        if words[1] != "demo":  # the same again, and longer
            run(preloaded, tmp_path, "import sys; from etude.cli.main import main; sys.exit(main())", *words[1:])


def test_yaml_holds_settings() -> None:
    found = [block for page in PAGES for block in blocks(page) if block.kind == "yaml"]
    assert found
    for block in found:
        values = yaml.safe_load(block.code)
        from_dict(Stop, values.pop("stop", {}), owner="stop")
        from_dict(BCConfig if "data" in values else PPOConfig, values, owner="page")


EXAMPLES = [runnable(path, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.py"))]


ARGUMENTS = {
    "atari.py": ["2000"],
    "gpu_env.py": ["65536"],
    "imitate_a_human.py": ["script"],
    "served_page.py": ["picture"],
}
"""Of examples that would take minutes otherwise, or wait for a person."""

NEEDED = {"atari.py": ("ale_py", "cv2"), "imitate_a_human.py": ("pygame",), "served_page.py": ("starlette", "uvicorn")}
"""Optional packages."""

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

PICTURES = ROOT / "docs" / "assets" / "gallery"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_leaves_its_picture(example: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    for package in NEEDED.get(example.name, ()):
        pytest.importorskip(package)
    if example.name == "served_page.py" and BROWSER is None:
        pytest.skip("no Chromium or Chrome on the path")
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 100
    printed = run(preloaded, tmp_path, example, *ARGUMENTS.get(example.name, []))
    assert printed
    for picture in PICTURES.glob(f"{example.stem}.*"):
        with Image.open(tmp_path / picture.name) as made, Image.open(picture) as shown:
            assert made.size == shown.size
            assert len(made.convert("RGB").getcolors(1 << 20) or range(1 << 20)) > 4  # something is drawn
    if example.name == "served_page.py":
        found = re.search(r"best: (\d+) steps", printed)
        assert found is not None, printed
        assert int(found[1]) >= 100


def test_the_gallery_shows_small_pictures_of_examples() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = sorted(PICTURES.iterdir())
    assert len(pictures) >= 12
    assert sum(picture.stat().st_size for picture in pictures) < 2_000_000
    for picture in pictures:
        assert picture.stat().st_size < 200_000, picture
        assert f"assets/gallery/{picture.name})" in page
        assert (ROOT / "examples" / f"{picture.stem}.py").exists(), picture
    for example in (ROOT / "examples").glob("*.py"):
        assert f"examples/{example.name}" in page, example
