"""Parts of a model, run through stubs, against the whole model run by mlx-lm itself."""

import gc
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from stages.core.layers.guard import check_cut, check_loss, perturbed_adapters
from stages.core.layers.staged import LayerFacts, StagedModel, UnsupportedModel, layer_list, probe
from stages.core.update.loss import gathered_loss, plain_loss, target_positions
from tests.core.small_models import CONFIGS, LAYERS, VOCABULARY, add_lora, build

SUPPORTED = [name for name in CONFIGS if name != "nanbeige_looped"]
ROWS, TOKENS = 2, 11  # longer than the sliding windows of 8


def batch(seed=1):
    noise = np.random.default_rng(seed)
    tokens_BT = noise.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
    mask_BT = noise.random((ROWS, TOKENS)) < 0.5
    mask_BT[:, 0] = False
    return tokens_BT, mask_BT


def lora_model(name, cut):
    model = build(name)
    add_lora(model, len(model.layers) - cut)
    return model


def cuts(name):
    count = CONFIGS[name][1].get("num_hidden_layers", LAYERS)
    return [1, count // 2, count - 1]


def distance(a, b):
    """Relative Euclidean distance of two sets of arrays, in NumPy float64."""
    assert a.keys() == b.keys()
    one, other = (np.concatenate([np.array(x[k], np.float64).ravel() for k in b]) for x in (a, b))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_cut_and_the_head_give_the_whole_models_step(name):
    tokens_BT, mask_BT = batch()
    tokens = mx.array(tokens_BT)
    for cut in cuts(name):
        model = lora_model(name, cut)
        whole_BTV = model(tokens)
        with StagedModel(model) as staged:
            logits_BTV = staged.logits(tokens, staged.frozen(tokens, cut), cut)
            assert mx.array_equal(logits_BTV, whole_BTV), cut
            assert check_cut(staged, tokens_BT, mask_BT, cut) == (0.0, 0.0), cut
            loss, gradient = check_loss(staged, tokens_BT, mask_BT, chunk=4)
            assert loss <= 1e-5 and gradient <= 1e-5, cut
            assert staged.first_trained() == cut


# A new machine builds every fused kernel first: up to 20 s for a model, a second from then on.
QUICK = ("llama", "gemma4_text")
COMPILED = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_equal_the_whole_model(name):
    tokens_BT, mask_BT = batch()
    cut = cuts(name)[1]
    model = lora_model(name, cut)
    targets = int(mask_BT.sum())
    gathered = [mx.array(x) for x in target_positions(tokens_BT, mask_BT, targets + 3)]
    tokens, mask, divisor = mx.array(tokens_BT), mx.array(mask_BT), mx.array(float(targets))

    def compiled(loss):
        state = [model.state]
        step = mx.compile(nn.value_and_grad(model, loss), inputs=state, outputs=state)
        value, gradient = step(tokens, mask, boundary, gathered, divisor)
        mx.eval(value, gradient)
        return value.item(), dict(tree_flatten(gradient))

    def whole(tokens, mask, boundary, gathered, divisor):
        return plain_loss(model(tokens), tokens, mask, divisor)

    def split(tokens, mask, boundary, gathered, divisor):
        return plain_loss(staged.logits(tokens, boundary, cut), tokens, mask, divisor)

    def at_targets(tokens, mask, boundary, gathered, divisor):
        hidden = staged.top(tokens, boundary, cut)
        return gathered_loss(staged.head, hidden, *gathered, divisor=divisor, chunk=4)

    with perturbed_adapters(model), StagedModel(model) as staged:
        boundary = staged.frozen(tokens, cut)
        mx.eval(boundary)
        loss, gradient = compiled(whole)
        split_loss, split_gradient = compiled(split)
        chunk_loss, chunk_gradient = compiled(at_targets)
    assert split_loss == loss
    assert all(mx.array_equal(split_gradient[key], gradient[key]) for key in gradient)
    assert chunk_loss == pytest.approx(loss, rel=1e-5)
    assert distance(chunk_gradient, gradient) <= 1e-5


def train(model, step, below):
    """Five compiled Adam updates; the trained parameters."""
    optimizer = optim.Adam(learning_rate=1e-4)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(tokens, mask, boundary):
        loss, gradient = nn.value_and_grad(model, step)(tokens, mask, boundary)
        optimizer.update(model, gradient)
        return loss

    for seed in range(5):
        tokens, mask = (mx.array(x) for x in batch(seed))
        mx.eval(update(tokens, mask, below(tokens)), state)
    return dict(tree_flatten(model.trainable_parameters()))


def test_compiled_updates_above_a_cut_follow_plain_training():
    cut = 2
    plain, model = lora_model("qwen3", cut), lora_model("qwen3", cut)
    start = dict(tree_flatten(model.trainable_parameters()))

    whole = train(plain, lambda t, m, _: plain_loss(plain(t), t, m, 9.0), lambda _: {})
    with StagedModel(model) as staged:
        parts = train(
            model,
            lambda t, m, boundary: plain_loss(staged.logits(t, boundary, cut), t, m, 9.0),
            lambda t: staged.frozen(t, cut),
        )
    change = {key: whole[key] - start[key] for key in start}
    assert distance({key: parts[key] - start[key] for key in start}, change) <= 1e-6
    assert all(float(mx.abs(x).max()) > 1e-4 for x in change.values())


def test_the_model_is_itself_again_after_closing():
    model = lora_model("llama", 2)
    classes = [type(layer) for layer in model.layers]
    names = [name for name, _ in tree_flatten(model.parameters())]
    tokens = mx.array(batch()[0])
    before = model(tokens)
    with StagedModel(model) as staged:
        assert [name for name, _ in tree_flatten(model.parameters())] == names
        assert all(isinstance(a, b) for a, b in zip(model.layers, classes, strict=True))
        staged.top(tokens, staged.frozen(tokens, 2), 2)
        assert mx.array_equal(model(tokens), before), "plain use beside the staged one"
    assert [type(layer) for layer in model.layers] == classes
    assert mx.array_equal(model(tokens), before)


def test_an_error_inside_a_staged_run_leaves_the_model_usable():
    model = lora_model("llama", 2)
    tokens = mx.array(batch()[0])
    before = model(tokens)
    with StagedModel(model) as staged:
        with pytest.raises(ValueError):
            staged.top(tokens, {"hidden": mx.zeros((ROWS, TOKENS, 3))}, 2)
        assert mx.array_equal(model(tokens), before)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n", "gemma4_text"])
def test_model_code_that_works_in_place_does_not_change_a_stored_boundary(name):
    """gemma3n writes into the output of its last layer, gemma3 scales its embeddings in place."""
    model = build(name)
    tokens = mx.array(batch()[0])
    with StagedModel(model) as staged:
        cut = staged.facts.count
        boundary = staged.frozen(tokens, cut)
        stored = {key: np.array(value) for key, value in boundary.items()}
        first, second = (staged.logits(tokens, boundary, cut) for _ in range(2))
        assert mx.array_equal(first, second) and mx.array_equal(first, model(tokens))
        hidden = staged.top(tokens, boundary, cut)
        assert all(np.array_equal(stored[key], np.array(boundary[key])) for key in stored)
        assert np.array_equal(stored["hidden"], np.array(hidden))


def test_shared_outputs_join_the_boundary_with_their_axes():
    """gemma4: layers 4 and 5 take keys and values, (B, heads, T, head dim), of layers 2 and 3."""
    with StagedModel(build("gemma4_text")) as staged:
        assert staged.boundary_axes(2) == {"hidden": (-3, -2)}
        shared = {"layer2.0.0", "layer2.0.1", "layer3.0.0", "layer3.0.1"}
        assert staged.boundary_axes(4) == {"hidden": (-3, -2)} | dict.fromkeys(shared, (-4, -2))
        boundary = staged.frozen(mx.zeros((2, 7), mx.int32), 4)
        assert boundary["layer2.0.0"].shape == (2, 2, 7, 16)
        assert boundary["layer3.0.1"].shape == (2, 2, 7, 32)
    with StagedModel(build("gemma3n")) as staged:
        boundary = staged.frozen(mx.zeros((2, 7), mx.int32), 2)
        assert {key: value.shape for key, value in boundary.items()} == {"hidden": (3, 2, 7, 64)}


def test_probe_tells_how_layers_are_called():
    assert probe(build("llama")) == LayerFacts(4, (None,) * 4)
    assert probe(build("rwkv7")) == LayerFacts(4, (2,) * 4)
    assert probe(build("gemma4_text"), mx.zeros((1, 3), mx.int32)) == LayerFacts(6, (3,) * 6)


def test_layers_called_twice_are_refused():
    model = build("nanbeige_looped")
    classes = [type(layer) for layer in model.layers]
    with pytest.raises(UnsupportedModel, match="calls: 0, 1, 2, 3, 0, 1, 2, 3"):
        probe(model)
    assert [type(layer) for layer in model.layers] == classes
    with pytest.raises(UnsupportedModel, match="no list of layers"):
        layer_list(nn.Linear(2, 2))


def test_cuts_out_of_range_are_refused():
    with StagedModel(build("llama")) as staged:
        for cut in (0, 5):
            with pytest.raises(ValueError, match="expected 1 to 4"):
                staged.frozen(mx.zeros((1, 2), mx.int32), cut)


def test_the_guard_sees_a_cut_above_a_trained_layer():
    """Layers 2 and 3 of 4 are trained, and the cut stops the gradient of layer 2."""
    tokens_BT, mask_BT = batch()
    model = lora_model("llama", 2)
    with StagedModel(model) as staged:
        assert check_cut(staged, tokens_BT, mask_BT, 3).gradient > 0.1
    lora_b = [x for key, x in tree_flatten(model.trainable_parameters()) if key.endswith("lora_b")]
    assert lora_b and not any(mx.any(x).item() for x in lora_b), "put back after the check"


def test_trained_parameters_outside_the_layers_are_found():
    tied, untied, adapter = build("llama"), build("llama_untied"), build("llama_untied")
    with StagedModel(tied) as staged:
        assert staged.head_parameters().keys() == {"model.embed_tokens.weight", "model.norm.weight"}
        assert staged.first_trained() == 0
    untied.freeze()
    untied.lm_head.unfreeze()
    with StagedModel(untied) as staged:
        assert staged.head_parameters().keys() == {"lm_head.weight"}
        assert staged.first_trained() == 4
    untied.model.embed_tokens.unfreeze()
    with StagedModel(untied) as staged:
        assert staged.head_parameters().keys() == {"lm_head.weight"}
        assert staged.first_trained() == 0
    add_lora(adapter, 1, keys=["lm_head", "self_attn.q_proj"])
    with StagedModel(adapter) as staged:
        assert staged.head_parameters().keys() == {"lm_head.lora_a", "lm_head.lora_b"}
        assert staged.first_trained() == 3


def test_runners_run_exactly_the_layers_that_run():
    model = lora_model("llama", 2)
    tokens = mx.array(batch()[0])
    ran = []

    def runner(layer, call, args, kwargs):
        ran.append(next(i for i, other in enumerate(model.layers) if other is layer))
        return call(layer, *args, **kwargs)

    with StagedModel(model) as staged:
        for index in range(4):
            staged.run_layer_with(index, runner)
        boundary = staged.frozen(tokens, 2)
        assert ran[-2:] == [0, 1]
        ran.clear()
        hidden = staged.top(tokens, boundary, 2)
        staged.head(hidden[0])
        model(tokens)
        assert ran == [2, 3]
        staged.run_layer_with(3, None)
        staged.top(tokens, boundary, 2)
        assert ran == [2, 3, 2]


def nbytes(tree):
    return sum(x.nbytes for _, x in tree_flatten(tree))


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "llama_4bit"])
def test_freeing_leaves_only_the_weights_that_remain(name):
    gc.collect()
    start = mx.get_active_memory()
    model = build(name, intermediate_size=8192)
    add_lora(model, 1)
    cut = len(model.layers) - 1
    tokens = mx.array(batch()[0])
    before = model(tokens)
    mx.eval(before)
    with StagedModel(model) as staged:
        boundary = staged.frozen(tokens, cut)
        mx.eval(boundary)
        full = nbytes(model.parameters())
        staged.free_below(cut)
        left = nbytes(model.parameters())
        assert left < full / 2
        assert abs(mx.get_active_memory() - start - left) < 1e6
        assert mx.array_equal(staged.logits(tokens, boundary, cut), before)
        for run in (lambda: staged.frozen(tokens, cut), lambda: model(tokens)):
            with pytest.raises(RuntimeError, match="layer 0 was freed"):
                run()
    with pytest.raises(RuntimeError, match="layer 0 was freed"):
        model(tokens)
    trained = [key for key, _ in tree_flatten(model.trainable_parameters())]
    assert trained and all(key.startswith(f"model.layers.{cut}.") for key in trained)


class ToyLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __call__(self, hidden, shared):
        hidden = mx.tanh(self.linear(hidden))
        return (hidden if shared is None else mx.multiply(hidden, shared)), hidden


class ToyModel(nn.Module):
    """Layers 1 and 2 take a second output of layer 0; `reads` is what the model's code reads."""

    def __init__(self, reads=lambda layer: None):
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), [ToyLayer() for _ in range(3)]
        self.reads = reads

    def __call__(self, tokens):
        hidden, first = self.layers[0](self.embed(tokens), None)
        for layer in self.layers[1:]:
            hidden, _ = layer(hidden, first)
        self.reads(self.layers[0])
        return hidden @ self.embed.weight.T


def test_an_output_that_mlx_itself_refuses_joins_too():
    """mx.multiply(hidden, stand-in) raises mlx's own TypeError, which names no layer."""
    model = ToyModel()
    tokens = mx.array([[1, 2, 3]])
    with StagedModel(model) as staged:
        for cut in (1, 2):
            assert staged.boundary_axes(cut) == {"hidden": (-3, -2), "layer0.0": (-3, -2)}
            boundary = staged.frozen(tokens, cut)
            assert mx.array_equal(staged.logits(tokens, boundary, cut), model(tokens))
        assert staged.boundary_axes(3) == {"hidden": (-3, -2)}


def test_freeing_is_undone_where_the_models_code_reads_a_weight():
    model = ToyModel(reads=lambda layer: layer.linear.weight)
    tokens = mx.array([[1, 2, 3]])
    before = model(tokens)
    with StagedModel(model) as staged, pytest.raises(UnsupportedModel, match="reads weights"):
        staged.free_below(2)
    assert mx.array_equal(model(tokens), before)
    assert [type(layer) for layer in model.layers] == [ToyLayer] * 3
