"""What the documents say is so: links lead somewhere, named tests exist, examples run, scripts are well-formed."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS = ('pip install -e . && tandem run "What is the capital of France?"', 'pip install -e ".[test]" && pytest')


def test_the_two_lines_stand_at_the_top() -> None:
    lines = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if line.strip()]
    assert tuple(lines[1:3]) == COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_each_limit_of_the_server_stands_in_its_table() -> None:
    """Options that limit what the server takes; those whose help names 429 or 503 stand beside that status, too."""
    from tandem.serve.options import ServeOptions

    page = (ROOT / "docs" / "server.md").read_text()
    limits = re.search(r"\n## Limits\n(.*?)\n## ", page, re.DOTALL).group(1)
    fields = [f for f in dataclasses.fields(ServeOptions) if f.metadata["group"] == "limits"]
    options = {f"--{f.name.replace('_', '-')}": f.metadata["help"] for f in fields}
    options |= {"--max-waiting": "429", "--max-new-grammars": "503"}
    assert [name for name in options if f"`{name}`" not in limits] == []
    for status in ("429", "503"):
        rows = "".join(line for line in page.splitlines() if line.startswith(f"| {status} |"))
        assert [name for name, text in options.items() if status in text and f"`{name}`" not in rows] == []
    assert "429" in options["--max-bodies"] and "503" in options["--max-bodies"]
    assert "page" in next(f.metadata["help"] for f in dataclasses.fields(ServeOptions) if f.name == "api_key_file")


def test_each_invariant_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 11))
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", row)
        assert files, row
        names = [name for _, name in files if name] + re.findall(r"`…::(\w+)", row)
        sources = [(ROOT / file).read_text() for file, _ in files]
        for name in names:
            assert any(f"def {name}" in source for source in sources), name


def test_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        code = block.replace("LLM(max_num_seqs=32)", 'LLM(device="null", max_num_seqs=32)')
        code = code.replace("AsyncEngine.start()", 'AsyncEngine.start(device="null")')
        assert "null" in code
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("script", ["scripts/check", "scripts/test", "scripts/bench", ".ci/run"])
def test_scripts_are_well_formed(script: str) -> None:
    path = ROOT / script
    text = path.read_text()
    assert path.stat().st_mode & 0o111 and text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
