import io

from rich.console import Console

from stages.core import console
from stages.evaluate import summary

METRICS = {
    "base": {"loss": 2.0, "perplexity": 7.389, "token_accuracy": 0.5},
    "tuned": {"loss": 1.5, "perplexity": 4.4817, "token_accuracy": 0.6},
    "rows": 12,
    "targets": 3456,
    "loss_change": -0.5,
    "loss_change_low": -0.61,
    "loss_change_high": -0.4,
    "improved_share": 0.75,
    "also_in_train": {"rows": 0},
}
SAMPLE = {
    "row": 3,
    "source": "a.jsonl",
    "line": 4,
    "turns": [{"role": "user", "content": "ask [/b] [red]"}],
    "prompt": "unused",
    "reference": "told",
    "base": {"text": "[/] base"},
    "tuned": {"text": "tuned " * 200},
}


def printed(monkeypatch, metrics, samples):
    text = io.StringIO()
    monkeypatch.setattr(console, "_console", Console(file=text, width=100, soft_wrap=True))
    summary.show("test", metrics, samples)
    return text.getvalue()


def test_table_interval_samples_and_next_steps(monkeypatch):
    text = printed(monkeypatch, METRICS, [SAMPLE] * 5)
    assert "test: 12 rows, 3,456 targets" in text
    for cell in (
        "2.0000",
        "1.5000",
        "7.389",
        "4.482",
        "50.0%",
        "-0.5000",
        "-39.3%",
        "+10.0 points",
    ):
        assert cell in text
    assert "95% interval -0.6100 to -0.4000" in text
    assert "better; 75% of the rows improved" in text
    assert text.count("row 3 (a.jsonl:4)") == 3
    assert "reports/report.html" in text
    assert "make chat" in text


def test_words_of_the_data_are_no_markup(monkeypatch):
    text = printed(monkeypatch, METRICS, [SAMPLE])
    for words in ("ask [/b] [red]", "[/] base"):
        assert words in text


def test_long_samples_are_shortened_and_wrapped(monkeypatch):
    text = printed(monkeypatch, METRICS, [SAMPLE])
    assert max(map(len, text.splitlines())) <= 130
    assert text.count("tuned") < 70


def test_the_prompt_stands_above_on_one_line():
    sample = {**SAMPLE, "turns": [{"role": "user", "content": "one\n\n  two " + "x" * 500}]}
    assert summary.asked(sample).startswith("one two xxx")
    assert len(summary.asked(sample)) <= 160
    assert summary.asked({**SAMPLE, "turns": [], "prompt": "Once upon"}) == "Once upon"


def test_verdict_follows_the_interval():
    def words(low, high):
        return summary.verdict({**METRICS, "loss_change_low": low, "loss_change_high": high})

    assert "no clear change" in words(-0.1, 0.1)
    assert "worse" in words(0.1, 0.2)


def test_leaked_rows_and_few_rows_are_said():
    rest = {"base": {"loss": 2.0}, "tuned": {"loss": 1.9}}
    leaked = {**METRICS, "also_in_train": {"rows": 2}, "not_in_train": rest}
    assert summary.notes("test", leaked) == [
        "2 test rows also stand in train (without them: -0.1000)"
    ]
    assert summary.notes("test", {**METRICS, "rows": 2}) == ["few rows (2): the interval is rough"]
