"""The listing of `--help` names every key with its meaning."""

from stages.compose import keys
from stages.core.config.settings import known_keys


def test_every_value_is_listed_with_its_default():
    lines = keys.listing().splitlines()
    assert "  train.learning_rate=0.0001" in lines
    assert "  memory.batch_size=auto" in lines
    groups = {key for key in known_keys() if any(k.startswith(key + ".") for k in known_keys())}
    for key in set(known_keys()) - groups:
        assert any(line.startswith(f"  {key}=") for line in lines), key


def test_the_meaning_stands_below_its_key():
    lines = keys.listing().splitlines()
    assert "Layers trained" in lines[lines.index("  train.num_layers=8") + 1]
