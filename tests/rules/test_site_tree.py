"""Every page of the documentation is in the tree of the site, and every link leads somewhere, here and there."""

import re
from pathlib import Path

import pytest
from docpages.assemble import landing, parts
from docpages.links import FIXED, anchors, broken, docname, links, prose, rewrite, slug

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "index.md"
DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_ext" not in path.parts]
PAGES = [*DOCS, *(ROOT / name for name in FIXED if name.endswith(".md") and (ROOT / name).is_file())]


def test_links_in_the_repository_lead_somewhere():
    found = [sentence for page in PAGES for sentence in broken(page, ROOT)]
    assert not found, "\n".join(found)


def test_every_page_is_in_the_tree():
    listed = {page for part in parts(INDEX.read_text()) for page in part.pages}
    own = {docname(path.relative_to(ROOT).as_posix()) for path in PAGES if path != INDEX}
    assert not own - listed, f"{sorted(own - listed)}: give them a row in docs/index.md"


def test_the_tree_has_each_page_once_and_each_group_a_page():
    tree = parts(INDEX.read_text())
    pages = [page for part in tree for page in part.pages]
    assert len(pages) == len(set(pages))
    groups = [landing(part, group) for part in tree for group in part.groups]
    assert len(groups) == len(set(groups)) >= 5
    assert [part.title for part in tree][:2] == ["Tutorials", "How-to guides"]


def test_links_on_the_site_lead_to_its_pages():
    text = "see [a](../examples/ddp.py), [b](../../README.md#more), [c](zero3.md), `[d](e)`, ![f](../moe-loss.png)"
    used = []
    assert rewrite(text, "docs/guides/muon.md", ROOT, used.append) == (
        "see [a](../examples/ddp.py.md), [b](../project/readme.md#more), [c](zero3.md), `[d](e)`, ![f](../moe-loss.png)"
    )
    assert used == ["docs/examples/ddp.py", "README.md", "docs/guides/zero3.md", "docs/moe-loss.png"]
    assert rewrite("[x](setup.py)", "README.md", ROOT, used.append) == "[x](../source/setup.py.md)"
    fenced = "```text output\n[x](nowhere)\n```"
    assert rewrite(fenced, "README.md", ROOT, used.append) == fenced


def test_names_of_the_api_page_lead_to_the_pages_of_modules():
    text = "[x](../reference/api.md#mpispeedmonitorconsole) [y](../reference/api.md#mpispeedengine)"
    found = rewrite(text, "docs/guides/muon.md", ROOT, lambda _: None)
    assert found == (
        "[x](../reference/api/mpispeed.monitor.md#mpispeedmonitorconsole) "
        "[y](../reference/api/mpispeed.md#mpispeedengine)"
    )


def test_a_link_to_nothing_does_not_pass():
    with pytest.raises(ValueError, match=re.escape("docs/guides/muon.md: the link to gone.md leads to nothing")):
        rewrite("[x](gone.md)", "docs/guides/muon.md", ROOT, lambda _: None)


def test_a_link_out_of_the_repository_is_no_page_of_the_site(tmp_path):
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (tmp_path / "secret.txt").touch()
    (root / "docs" / "by-link.txt").symlink_to(tmp_path / "secret.txt")
    for target in ("../../secret.txt", "by-link.txt"):
        with pytest.raises(ValueError, match="leads out of the repository"):
            rewrite(f"[x]({target})", "docs/page.md", root, lambda _: None)


def test_broken_links_are_named_with_their_lines(tmp_path):
    (tmp_path / "other.md").write_text("# Title\n## A `name`, twice\n## A `name`, twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-name-twice-1) [b](other.md#gone)\n```\n[c](gone.md)\n```\n"
        "[d](gone.md) [e](https://a.b/c) `[f](gone.md)` [g](#no)\n"
    )
    assert list(broken(page, tmp_path)) == [
        "page.md:1: other.md#gone: other.md has no heading with this anchor",
        "page.md:5: gone.md: there is no such file",
        "page.md:5: #no: page.md has no heading with this anchor",
    ]
    assert [link.target for link in links(page.read_text()) if link.is_external] == ["https://a.b/c"]


def test_anchors_are_those_of_github():
    assert slug("`mpispeed.zero.Init`") == "mpispeedzeroinit"
    assert slug("Run on an H100, and on [an H200](x.md)") == "run-on-an-h100-and-on-an-h200"
    assert anchors("# A\n~~~\n# B\n~~~\n# A\n") == {"a", "a-1"}


def test_a_longer_fence_holds_a_shorter_one():
    text = "````text\n```\n[x](y)\n````\nplain"
    assert [line for _, line, is_prose in prose(text) if is_prose] == ["plain"]
