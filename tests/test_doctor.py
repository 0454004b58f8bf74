"""The doctor: the right verdict for every architecture of the zoo and for each that is refused, and the line that says why."""

import pytest
import torch
import zoo
from test_chat import TEMPLATE

from graven.doctor import Check, Diagnosis, diagnosis
from graven.errors import ModelError
from graven.lm.pretrained import Pretrained
from graven.lm.probes import scale_inside

pytestmark = pytest.mark.plain  # what the doctor calls has its shapes checked in test_lm.py, over the same models
NEVER_ASKS = {"bloom": "cannot be set", "falcon": "cannot be set", "mpt": "cannot be set", "mamba": "never calls", "mamba2": "never calls"}
NO_CACHE = {"mamba", "mamba2", "jamba", "lfm2"}
FALCON_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "embedding_multiplier": 5.0}
GEMMA_3N = {
    "num_kv_shared_layers": 0, "laurel_rank": 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": zoo.VOCABULARY,
    "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0], "layer_types": ["full_attention"] * 2,
}  # fmt: skip
RECURRENT_GEMMA = {"lru_width": 32, "attention_window_size": 8, "block_types": ("recurrent", "attention"), "logits_soft_cap": 1.0}
CPM_ANT = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 2}

# architecture, settings, what is wrong with it, and what a line says of it
IDS = "ids equal embeddings"
UNFIT = {
    "scale outside": ("FalconH1Config", zoo.LLAMA | FALCON_H1, {IDS, "embedding scale", "generate"}, "scaled by 5 for tokens only"),
    "per-layer": ("Gemma3nTextConfig", zoo.WIDE | GEMMA_3N, {IDS, "per-layer embeddings"}, "vectors do without model.embed_tokens_per_layer"),
    "head": ("RecurrentGemmaConfig", zoo.WIDE | RECURRENT_GEMMA, {"head"}, "has a head that graven does not know"),
    "order": ("Gemma3TextConfig", zoo.WIDE | {"use_bidirectional_attention": True}, {"order of columns"}, "lets a column see later ones"),
    "no embeddings": ("CpmAntConfig", zoo.ENDS | CPM_ANT, {IDS}, "does not run from embeddings"),
}


def examined(raw, tokenizer=None):
    return diagnosis(Pretrained(raw, tokenizer or zoo.tokenizer(), name="m", checked=False))


def line(found, name):
    return next(check for check in found.checks if check.name == name)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_architecture_that_loads_works_and_what_limits_it_is_told(name):
    found = examined(zoo.architecture(name))
    assert found.works
    cached, twice = line(found, "cached reads"), line(found, "double backward")
    assert cached.ok is (name not in NO_CACHE)
    assert twice.ok is (name != "bloom")
    asks = name not in NEVER_ASKS and name != "gpt-oss"
    assert ("graven" in twice.found.split("(")[0]) is asks
    assert NEVER_ASKS.get(name, "") in twice.found
    limits = [check.name for check in found.checks if check.ok is False]
    assert found.verdict == "m works with memories" + (f"; see {', '.join(limits)}." if limits else ".")


@pytest.mark.parametrize("case", UNFIT)
def test_an_architecture_that_is_refused_at_load_does_not_work_and_the_table_says_why(case):
    kind, settings, wrong, words = UNFIT[case]
    raw = zoo.build(kind, settings, seed=0)
    found = examined(raw)
    assert not found.works
    assert {check.name for check in found.checks if check.needed and check.ok is False} >= wrong
    assert any(words in check.found for check in found.checks if check.name in wrong)
    assert found.verdict.startswith("m does not work with memories: ")
    with pytest.raises(ModelError):
        Pretrained(raw, zoo.tokenizer(), name="m")


def test_a_per_layer_embedding_that_weighs_nothing_yet_is_seen():
    raw = zoo.build("Gemma3nTextConfig", zoo.WIDE | GEMMA_3N, seed=0)
    with torch.no_grad():
        for name, parameter in raw.named_parameters():
            if "correct_output_scale" in name:
                parameter.zero_()  # as in a model that is fresh; tokens and vectors then give the same logits
    found = examined(raw)
    assert line(found, "ids equal embeddings").ok
    assert line(found, "per-layer embeddings").ok is False
    assert not found.works


class Coded(torch.nn.Module):
    """A linear map whose matrix is kept in 8 bits, as quantizing libraries keep it."""

    def __init__(self, plain):
        super().__init__()
        scale = plain.weight.detach().abs().max() / 127
        self.register_buffer("codes", (plain.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.codes.float() * self.scale)


class Deaf(Coded):
    """One that lets no gradient through."""

    def forward(self, x):
        return super().forward(x.detach())


@pytest.mark.parametrize(("kind", "works"), [(Coded, True), (Deaf, False)])
def test_quantized_weights_are_told_and_a_gradient_decides(kind, works):
    raw = zoo.architecture("llama")
    for layer in raw.model.layers:
        for part, names in ((layer.mlp, ("gate_proj", "up_proj", "down_proj")), (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj"))):
            for name in names:
                setattr(part, name, kind(getattr(part, name)))
    if kind is Deaf:
        raw.model.norm = torch.nn.Sequential(Deaf(torch.nn.Linear(32, 32, bias=False)))
    found = examined(raw)
    assert line(found, "weights").found.startswith("quantized (int8)")
    assert line(found, "gradient").ok is works
    assert found.works is works


def test_the_attention_is_afterwards_what_it_was():
    raw = zoo.architecture("llama")
    before = raw.config._attn_implementation
    examined(raw)
    assert raw.config._attn_implementation == before


@pytest.mark.parametrize(("name", "scale"), [("llama", 1.0), ("gemma", 32**0.5), ("granite", 1.0)])
def test_the_scale_inside_the_embedding_module_is_measured(name, scale):
    assert scale_inside(zoo.pretrained(name)) == pytest.approx(scale, rel=1e-5)


def test_tied_and_untied_heads_positions_and_windows_are_told():
    tied, untied = (examined(zoo.architecture(name)) for name in ("gpt2", "mistral"))
    assert line(tied, "tied head").found == "the embedding matrix is the head"
    assert line(untied, "tied head").found == "the head has a matrix of its own"
    assert line(tied, "positions").found == "64 columns, memory included, positions can be given"
    assert line(untied, "positions").found.endswith("layers with a window of 8 do not see a memory further back")


def test_a_chat_template_and_a_token_too_many_are_told():
    tokenizer = zoo.tokenizer(words=97)
    tokenizer.chat_template = TEMPLATE
    found = examined(zoo.architecture("llama"), tokenizer)
    assert line(found, "chat template").ok
    assert line(found, "tokens").found.endswith("it gives token 96 and the model knows 96")
    assert found.verdict == "m works with memories; see tokens."


def test_the_table_has_a_line_for_each_check_and_one_verdict():
    checks = (Check(name="a", ok=True, found="x", needed=True), Check(name="b", ok=None, found="y"), Check(name="c", ok=False, found="z"))
    found = Diagnosis(model="m", architecture="M", checks=checks)
    assert found.lines() == ["m (M)", f"{'a':<22}yes  x", f"{'b':<22}-    y", f"{'c':<22}no   z", "m works with memories; see c."]
