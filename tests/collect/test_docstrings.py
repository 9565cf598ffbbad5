"""The built-in corpus: the same for everyone, split by module, cut right."""

import ast
import hashlib
import inspect
import textwrap
from pathlib import Path

import pytest

from stages.collect import docstrings
from stages.core.errors import UserError

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
SHA256 = "df67438ddeed120d91ee84cc2fb65dc195646236a8f035ee46cad07d74dd2ed7"


@pytest.fixture(scope="module")
def corpus():
    return docstrings.rows(PYPROJECT)


def values(modules):
    return [row for _, block in modules for row in block.values]


def test_sizes_and_lengths_suit_the_default_run(corpus):
    """About 3.2 characters a token with SmolLM2's tokenizer."""
    sizes = {split: len(values(modules)) for split, modules in corpus.items()}
    assert sizes == {"train": 672, "valid": 64, "test": 96}
    for split, modules in corpus.items():
        lengths = sorted(len(row["prompt"]) + len(row["completion"]) for row in values(modules))
        assert 450 < lengths[len(lengths) // 2] < 700, split
        assert 3_000 < lengths[-1] < 13_000, split
        assert sum(length > 1_900 for length in lengths) >= 2, split


def test_the_corpus_is_the_same_for_everyone(corpus):
    digest = hashlib.sha256()
    for split, modules in corpus.items():
        for name, block in modules:
            for line, row in zip(block.lines, block.values, strict=True):
                text = "\x00".join([split, name, str(line), row["prompt"], row["completion"]])
                digest.update(text.encode() + b"\x01")
    assert digest.hexdigest() == SHA256


def test_no_module_stands_in_two_splits(corpus):
    names = [name for modules in corpus.values() for name, _ in modules]
    assert len(names) == len(set(names))
    assert len({row["prompt"] for modules in corpus.values() for row in values(modules)}) == 832


def test_rows_go_through_the_stage_with_module_and_line(run, workspace, corpus):
    (workspace / "pyproject.toml").write_text(PYPROJECT.read_text())
    found = run(docstrings.PATH)
    for split, modules in corpus.items():
        assert found.records(split) == values(modules)
        expected = [(name, line) for name, block in modules for line in block.lines]
        assert [(row["source"], row["line"]) for row in found.tables[split]] == expected
    assert found.report["leaks"] == []
    assert all(split["duplicates"] == [] for split in found.report["splits"].values())


def code_of(row):
    head, _, rest = row["prompt"].partition("\n\n```python\n")
    assert head == docstrings.INSTRUCTION
    return rest.removesuffix("\n```")


def test_every_row_is_a_function_without_its_docstring(corpus):
    """Put back where it was, the docstring must be the one Python itself sees there."""
    for modules in corpus.values():
        for row in values(modules):
            (function,) = ast.parse(textwrap.dedent(code_of(row))).body
            assert isinstance(function, ast.FunctionDef)
            first = function.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            assert not (is_text and isinstance(first.value.value, str))
            assert row["completion"] == row["completion"].strip("\n")


SOURCE = '''
class A:
    def plain(self, x):
        """Return x, and say so at some length.

        Examples
            An indented line.
        """
        # a comment
        return "not a docstring"

    def only_doc(self):
        """There is no code behind this docstring."""

    def short(self):
        """Too short."""
        return 1

    def beside(self): """One line with its code beside it."""; return 1

    @property
    def raw(self):
        r"""A raw docstring with \\d in it, long enough."""
        return (
            1
        )

def none(x):
    return x
'''


def test_functions_are_cut_as_text():
    plain, raw = docstrings.functions_of(SOURCE)
    assert plain.code == ('def plain(self, x):\n    # a comment\n    return "not a docstring"')
    assert plain.docstring == (
        "Return x, and say so at some length.\n\nExamples\n    An indented line."
    )
    assert raw.code == "def raw(self):\n    return (\n        1\n    )"
    assert raw.docstring == r"A raw docstring with \d in it, long enough."
    assert SOURCE.split("\n")[plain.line - 1].strip().startswith("def plain")


@pytest.mark.parametrize(
    "text",
    [
        "one line",
        "\n    first\n      more\n    ",
        "first\n    second\n\n        third\n    ",
        "\ttabs\n\t\tdeep\n",
        "first\nnot indented\n    deep",
    ],
)
def test_docstrings_are_cleaned_as_the_standard_library_does(text):
    expected = "\n".join(line.rstrip() for line in inspect.cleandoc(text).split("\n"))
    assert docstrings.clean(text) == expected


@pytest.mark.parametrize(
    ("pins", "found"),
    [('toolz = "0.0.1"', "1.2.0"), ('no-such-distribution = "1"', "not installed")],
)
def test_another_version_is_refused(tmp_path, pins, found):
    (tmp_path / "pyproject.toml").write_text(f"[tool.samestep.corpus]\n{pins}\n")
    with pytest.raises(UserError) as caught:
        docstrings.rows(tmp_path / "pyproject.toml")
    assert caught.value.found == found
    assert caught.value.fix == "make setup"


def test_a_folder_without_pyproject_is_said(tmp_path):
    with pytest.raises(UserError) as caught:
        docstrings.rows(tmp_path / "pyproject.toml")
    assert "run from the project's root" in caught.value.fix
