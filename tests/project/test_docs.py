"""The README and docs/: what they print runs, and what they name exists.

`support.pages` tells how the blocks of a page are marked.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from support.imports import LAYERS
from support.pages import (
    PAGES,
    ROOT,
    Script,
    anchors,
    blocks,
    links,
    repository,
    scripts,
    spans,
    text_of,
)
from support.rank_pool import worker_environment
from support.script_nursery import ScriptNursery

from tagi_ddp.commands.main import main
from tagi_ddp.communicators.errors import died_text

README, ARCHITECTURE = ROOT / "README.md", ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
LINKED = [*PAGES, CONTRIBUTING, ROOT / "CHANGELOG.md"]
FENCES = {
    "python": r"|gpu|file=examples/\w+\.py",
    "text": "|output|layers",
    "sh": "",
    "console": "",
}
HAS_GPU = Path("/dev/nvidiactl").exists()
SOURCES = ("tagi_ddp/", "cpp_backend/", "tests/", "CMakeLists.txt")
# What commands write, and the reader's own.
WRITTEN = {"build/bench.json", "build/gpu/", "build/gpu.json", "build/gpu.txt", "wheels/"}
NOT_KEPT = {*WRITTEN, "script.py"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
every_linked = pytest.mark.parametrize("page", LINKED, ids=name_of)


# --- Python ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[ScriptNursery]:
    """Yield a nursery that runs the pages' scripts without importing torch for each rank."""
    made = ScriptNursery()
    yield made
    made.close()


def parameter(script: Script) -> object:
    there = pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
    return pytest.param(script, id=script.name, marks=[pytest.mark.gpu, there] * script.gpu)


ALL_SCRIPTS = [parameter(script) for page in PAGES if page != README for script in scripts(page)]


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_a_page_runs(script: Script, nursery: ScriptNursery, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script.code)
    printed = launched(script, path) if script.options else forked(script, path, nursery)
    lines = iter(printed)
    for line in script.prints:
        assert line in lines, f"{line!r} was not printed, or not in this order: {printed}"


def test_the_finished_job_of_the_page_makes_no_more_steps(
    nursery: ScriptNursery, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(scripts(ROOT / "docs" / "checkpoints.md")[0].code)
    (first, _), (again, _) = nursery.run(path, 2), nursery.run(path, 2)
    assert again == first.replace("began at step 0\n", "began at step 30\n") != first


def launched(script: Script, path: Path) -> list[str]:
    """Return what it prints under the launcher whose options it has."""
    launcher = [sys.executable, "-m", "tagi_ddp", "run", "-n", str(script.ranks), *script.options]
    environment, folder = worker_environment({}), path.parent
    return subprocess.check_output(
        [*launcher, str(path)], cwd=folder, env=environment, text=True, timeout=100
    ).splitlines()


def forked(script: Script, path: Path, nursery: ScriptNursery) -> list[str]:
    """Return the same, of ranks that need no launcher."""
    printed = nursery.run(path, script.ranks)
    if script.ranks == 1:
        return printed[0].splitlines()
    return [f"[{rank}] {line}" for rank, text in enumerate(printed) for line in text.splitlines()]


def test_the_first_examples_of_the_readme_run(nursery: ScriptNursery, tmp_path: Path) -> None:
    first, _ = scripts(README)
    (tmp_path / "script.py").write_text(first.code)
    (printed,) = nursery.run(tmp_path / "script.py", 1)
    assert printed.splitlines() == first.prints


@every_page
def test_blocks_are_marked(page: Path) -> None:
    for block in blocks(page):
        assert block.kind in FENCES, f"no info string, or an unknown one:\n{block.text}"
        assert re.fullmatch(FENCES[block.kind], block.option), block
        if block.kind == "python":
            compile(f"if True:\n{block.text}" if block.text[0] == " " else block.text, page, "exec")
        if block.option.startswith("file="):
            assert block.text in (ROOT / block.option.removeprefix("file=")).read_text()


# --- commands ----------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """Return the words of the commands in blocks, and of those in backticks."""
    typed = [line.split(" | ")[0] for block in blocks(page) for line in block.commands]
    typed += [span for span in spans(page) if span.split()[0] in CHECKS]
    return [[word for word in shlex.split(line) if "=" not in word] for line in typed]


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what `tagi-ddp COMMAND --help` prints."""
    texts = {}
    for command in ("run", "doctor", "plan"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        texts[command] = capsys.readouterr().out
    return texts


def options_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("-")]


def check_script(words: list[str]) -> None:
    """Check a script, by its name and its options; there may be none."""
    for i, word in enumerate(words):
        if word.endswith(".py"):
            if word not in NOT_KEPT:
                text = (ROOT / word).read_text()
                assert all(f'"{option}"' in text for option in options_of(words[i:])), words
            return


def check_tagi_ddp(words: list[str], help_of: dict[str, str]) -> None:
    if not words:
        return
    command, *rest = words
    assert command in help_of, words
    own = next((i for i, word in enumerate(rest) if word.endswith(".py")), len(rest))
    assert all(option in help_of[command] for option in options_of(rest[:own])), words
    check_script(rest)


def check_make(words: list[str], _: dict[str, str]) -> None:
    targets = words[2:] if words[:1] == ["-C"] else words
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make has no target {target}"


def check_python(words: list[str], _: dict[str, str]) -> None:
    if words[:2] == ["-m", "benchmarks"]:
        families = (ROOT / "benchmarks" / "__main__.py").read_text()
        assert all(f'"{family}"' in families for family in words[2:]), words
    elif words[:2] == ["-m", "pytest"]:
        assert words[2] in repository()
    else:
        check_script(words)


def check_pip(words: list[str], _: dict[str, str]) -> None:
    extras = importlib.metadata.metadata("tagi-ddp").get_all("Provides-Extra") or []
    assert words[0] == "install"
    assert set(re.findall(r"\[(\w+)\]", words[1])) <= set(extras)


def check_launcher(words: list[str], _: dict[str, str]) -> None:
    check_script(words)


CHECKS = {
    "tagi-ddp": check_tagi_ddp,
    "make": check_make,
    "python": check_python,
    ".venv/bin/python": check_python,
    "pip": check_pip,
    **dict.fromkeys(
        ("git", "install", "head", "export", "npm", "mkdir", "tar"), lambda words, _: None
    ),
    **dict.fromkeys(("python3", "source"), lambda words, _: None),
    **dict.fromkeys(("mpirun", "torchrun", "srun"), check_launcher),
}


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=name_of)
def test_commands_exist(page: Path, help_of: dict[str, str]) -> None:
    for program, *words in commands(page):
        CHECKS[program](words, help_of)


def test_make_lists_all_targets() -> None:
    printed = subprocess.check_output(["make", "--no-print-directory"], cwd=ROOT, text=True)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    described = re.findall(r"^make ([\w-]+) +\w.*$", printed, re.MULTILINE)
    assert described == phony.split() == [line.split()[1] for line in printed.splitlines()]


def test_the_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (b for b in blocks(ROOT / "docs" / "planning.md") if b.kind == "console")
    (command,) = first.commands
    assert main(shlex.split(command)[1:]) == 0
    assert f"$ {command}\n{capsys.readouterr().out}" == first.text
    (command,) = second.commands
    begin, last = command.split(" | ")
    assert last == "tail -1"
    assert main(shlex.split(begin)[1:]) == 0
    assert f"$ {command}\n{capsys.readouterr().out.splitlines()[-1]}\n" == second.text


# --- names -------------------------------------------------------------------------------------


@every_linked
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert str(target.relative_to(ROOT)) in repository(), link
        assert not anchor or anchor in anchors(target), link


def test_every_picture_is_shown_and_small() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    pictures = {ROOT / path for path in repository() if path.endswith(".png")}
    assert pictures
    assert pictures <= shown
    for path in pictures:
        content = path.read_bytes()
        assert len(content) < 100_000, path
        assert int.from_bytes(content[16:20], "big") <= 1200, path  # its width in pixels


def test_every_page_is_in_both_indices_and_on_the_site() -> None:
    index = ROOT / "docs" / "README.md"
    for page in (README, index):
        linked = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        assert set(PAGES) - {README, index} <= linked
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f": {page.name}\n" in navigation for page in PAGES)


def looks_like_a_path(word: str) -> bool:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", word) or word in NOT_KEPT:
        return False
    path = PurePosixPath(word)
    in_repository = path.parts[0] in repository() and "/" in word
    return in_repository or word.endswith("/") or path.suffix in (".py", ".h", ".cpp", ".md")


@every_linked
def test_paths_exist(page: Path) -> None:
    missing = []
    for word in filter(looks_like_a_path, spans(page)):
        end = word.rstrip("/")
        if not any(path == end or path.endswith(f"/{end}") for path in repository()):
            missing.append(word)
    assert not missing, ", ".join(missing)


@every_linked
def test_names_of_the_package_exist(page: Path) -> None:
    for name in re.findall(r"`(tagi_ddp(?:\.\w+)+)", text_of(page)):
        folders = name.split(".")
        rest = []
        while not (found := module(folders)):
            rest.insert(0, folders.pop())
        text = (ROOT / found).read_text()
        assert all(re.search(rf"\b{part}\b", text) for part in rest), f"{name} is not in {found}"


def module(folders: list[str]) -> str:
    path = "/".join(folders)
    return next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in repository()), "")


def test_environment_variables_exist() -> None:
    own = "tests/project/test_docs.py"
    sources = [
        (ROOT / path).read_text(errors="replace")
        for path in repository()
        if path.startswith(SOURCES) and (ROOT / path).is_file() and path != own
    ]
    known = set(re.findall(r"[A-Z][A-Z_]+", "\n".join(sources)))
    for page in LINKED:
        named = {span for span in spans(page) if re.fullmatch(r"[A-Z]+_[A-Z_]+", span)}
        assert named <= known, name_of(page)


# --- architecture.md ---------------------------------------------------------------------------


def test_the_order_of_imports_is_the_one_that_is_held() -> None:
    (block,) = (block for block in blocks(ARCHITECTURE) if block.option == "layers")
    assert [tuple(line.split(", ")) for line in block.text.splitlines()] == list(LAYERS)


def test_the_failure_has_the_text_of_a_lost_rank() -> None:
    texts = [block.text for block in blocks(ARCHITECTURE)]
    assert f"all_reduce #2 on rank 0 of 2 (gloo): {died_text([1])}\n" in texts


@pytest.mark.parametrize("folder", ["tagi_ddp", "cpp_backend"])
def test_the_layout_names_every_folder(folder: str) -> None:
    _, _, table = text_of(ARCHITECTURE).partition(f"\n`{folder}/`, ")
    table = table.partition("\n\n`")[0]
    named = re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE)
    parents = {
        PurePosixPath(path).parent
        for path in repository()
        if path.startswith(f"{folder}/") and path.endswith((".py", ".cpp", ".h"))
    }
    folders = {str(path.relative_to(folder)) for path in parents} - {"."}
    assert sorted(named) == sorted(folders)


def test_what_this_package_does_beside_others_is_shown() -> None:
    """Each yes of ours links to the test or page that shows it."""
    rows = (ROOT / "docs" / "ecosystem.md").read_text().splitlines()
    ours = [row.split("|")[2].strip() for row in rows if row.startswith("|") and "**" not in row]
    assert ours[:2] == ["tagi_ddp", "---"]
    assert len(ours) > 20
    assert all("](" in each for each in ours[2:])


def test_commands_work_in_a_clone_and_without_one() -> None:
    """The package is on no registry, so none is told to install its extras from one."""
    sources = [*(ROOT / "tagi_ddp").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    told = [str(path) for path in sources if "tagi-ddp[" in path.read_text()]
    assert told == []
