"""What the documents say of the project: the reference is that of the code, links lead somewhere, pages are found."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvasir_node

ROOT = Path(kvasir_node.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_reference_is_that_of_the_code(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import make_reference

    made = make_reference.pages()
    kept = {path.name: path.read_text() for path in make_reference.FOLDER.iterdir()}
    assert set(kept) == set(made)
    differ = [name for name, text in made.items() if kept[name] != text]
    assert not differ, "run docs/make_reference.py"


def test_the_reference_tells_of_each_setting_command_and_path():
    from kvasir_node.base.settings import setting_keys
    from kvasir_node.surfaces.cli import app as verbs

    settings, commands = (DOCS / "reference" / name for name in ("settings.md", "commands.md"))
    listed = re.findall(r"^\| `(\w+\.\w+)` \| `[^`]*` \| (.+?) \|", settings.read_text(), re.MULTILINE)
    assert [key for key, meaning in listed if meaning] == list(setting_keys())
    assert verbs.registered_groups
    for verb in ("up", "config show", "bench fanout", "revoke"):
        assert f"## `kvasir-node {verb}`" in commands.read_text()
    # every path says what it does
    assert not re.findall(r"^\| `.*` \|\s+\|$", (DOCS / "reference" / "http.md").read_text(), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As the usual hosts make them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    text = re.sub(r"^(```|    ).*?$", "", page.read_text(), flags=re.MULTILINE)
    for target in LINK.findall(text):
        place, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", place):
            continue
        found = (page.parent / place).resolve() if place else page
        is_page = ROOT in found.parents and found.exists()
        if not is_page or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_the_documents_leads_somewhere(page):
    assert list(broken(page)) == []


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A heading: two words\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-heading-two-words) [c](gone.md) [d](there.md#gone) [e](https://x.org/)"
    )
    assert list(broken(page)) == ["gone.md", "there.md#gone"]


def test_every_document_is_found_from_the_index():
    index = (DOCS / "README.md").read_text()
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in LINK.findall(index)}
    pages = {page.resolve() for page in DOCS.rglob("*.md")} - {(DOCS / "README.md").resolve()}
    assert pages <= linked, sorted(str(page.relative_to(DOCS)) for page in pages - linked)


def test_every_protocol_of_the_code_is_on_the_page():
    sources = "".join(path.read_text() for path in Path(kvasir_node.__file__).parent.rglob("*.py"))
    spoken = set(re.findall(r'"(/(?:kvasir|ipfs)/[a-z_]+/[\d.]+)', sources))
    assert len(spoken) > 10
    page = (DOCS / "protocols.md").read_text()
    assert [protocol for protocol in spoken if protocol not in page] == []
