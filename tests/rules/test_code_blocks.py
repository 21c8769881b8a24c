"""Every code block of the documentation says what it is: a language and a mark, as CONTRIBUTING.md lists them."""

from pathlib import Path

import pytest

from tests.helpers.code_blocks import Block, commands_of, is_shown, page_names, parse_page, read_page, words_of

PAGES = page_names()


def test_every_block_is_marked():
    found = [
        f"{block.place}: {mistake}"
        for name in PAGES
        for block in read_page(name).blocks
        if (mistake := block.mistake())
    ]
    assert not found, "\n".join(found)


def blocks(text: str) -> tuple[Block, ...]:
    return parse_page("page.md", text).blocks


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("", "without language"),
        ("python", "no mark"),
        ("sh run", "language 'sh'"),
        ("json run", "cannot be 'run'"),
        ("text check", "cannot be 'check'"),
        ("python run a.py", "behind the mark"),
        ("json check ../a.json", "behind the mark"),
        ("json check a.json b", "cannot be"),
    ],
)
def test_a_block_without_its_mark_is_named(info, said):
    (block,) = blocks(f"\n```{info}\nx\n```\n")
    assert said in block.mistake() and block.place == "page.md:2"


def test_a_block_is_read_with_its_file_and_what_it_prints():
    made = blocks(
        "```json check ds.json\n{}\n```\n\n"
        "- a\n  ```console run\n  a \\\n    b\n  # c\n  d # exit code 2\n  ```\n\n"
        "```text output\nx\n```\nand\n```text output\ny\n```\n"
    )
    assert [block.file for block in made] == ["ds.json", "", "", ""]
    assert [block.shows for block in made] == [False, False, True, False]
    assert not any(block.mistake() for block in made)
    assert [(one.line, one.text, one.exit_code) for one in commands_of(made[1])] == [
        (7, "a \\\n  b", 0),
        (10, "d # exit code 2", 2),
    ]


def test_a_block_that_never_ends_is_named():
    with pytest.raises(ValueError, match=r"page.md:3: the block never ends"):
        blocks("a\n\n```python run\n")


def test_scenes_and_their_ranks():
    page = parse_page("a.md", "<!-- scene: engine on 2 ranks -->\n\n<!-- scene: model tokens -->\n")
    assert page.ranks == 2 and [(one.line, one.names) for one in page.scenes] == [
        (1, ("engine",)),
        (3, ("model", "tokens")),
    ]
    with pytest.raises(ValueError, match="one number"):
        parse_page("a.md", "<!-- scene: a on 2 ranks -->\n<!-- scene: b on 3 ranks -->\n")


def test_words_of_a_line_of_shell():
    line = "for a in 1 2; do mpispeed run -n $a x.py | tee 'a b'; done   # mpispeed nothing"
    assert ["mpispeed", "run", "-n", "$a", "x.py"] in list(words_of(line))
    assert ["tee", "a b"] in list(words_of(line))


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [("a ... c\n", "a b c\n", True), ("a\n...\nz", "a\nb\nc\nz\n", True), ("a.c", "abc", False), ("a ...", "b", False)],
)
def test_three_dots_stand_for_anything(shown, printed, equal):
    assert is_shown(shown, printed) is equal


def test_every_page_is_known():
    assert {"README.md", "docs/index.md"} <= set(PAGES)
    assert all(Path(name).suffix == ".md" for name in page_names())
