import pytest

from stages.evaluate.scores import normalise, score, shares


@pytest.mark.parametrize(
    ("generated", "reference", "exact", "normalised"),
    [
        ("Paris", "Paris", True, True),
        (" Paris\n", "Paris", True, True),
        ("paris.", "Paris", False, True),
        ("The  capital\tis Paris!", "the capital is paris", False, True),
        ("ﬁne", "fine", False, True),  # NFKC: the ligature is two letters
        ("STRASSE", "straße", False, True),
        ("3.5", "35", False, False),  # a point inside a number is no punctuation
        ("Paris, France", "Paris", False, False),
    ],
)
def test_text(generated, reference, exact, normalised):
    found = score(generated, reference)
    assert (found.exact, found.normalised) == (exact, normalised)
    assert not found.json_expected


@pytest.mark.parametrize(
    ("generated", "valid", "equal"),
    [
        ('{"a": [1, 2], "b": "x"}', True, True),
        ('{ "b":"x", "a":[1,2] }', True, True),
        ('{"a": [2, 1], "b": "x"}', True, False),
        ('{"a": [true, 2], "b": "x"}', True, False),  # true is not 1
        ('{"a": [1.0, 2], "b": "x"}', True, True),
        ('{"a": [1, 2], "b": "x"', False, False),
        ('{"a": NaN}', False, False),
        ("a text", False, False),
        ("[" * 100_000, False, False),
    ],
)
def test_json(generated, valid, equal):
    found = score(generated, '{"a": [1, 2], "b": "x"}')
    assert found.json_expected
    assert (found.json_valid, found.json_equal) == (valid, equal)


def test_a_reference_that_is_no_json_equals_nothing_as_json():
    assert not score("words", "words").json_equal


def test_a_bare_number_expects_no_json():
    assert not score("5", "5").json_expected


def test_shares_count_json_rows_only_where_json_is_expected():
    scores = [score("a", "a"), score("A", "a"), score("[1]", "[1]"), score("[1", "[1]")]
    assert shares(scores) == {
        "exact_match": 0.5,
        "normalised_match": 0.75,
        "json_valid": 0.5,
        "json_equal": 0.5,
    }
    assert set(shares(scores[:2])) == {"exact_match", "normalised_match"}


def test_normalise_is_idempotent():
    text = "  «Été»,  DÉJÀ-vu?! "
    assert normalise(normalise(text)) == normalise(text)
