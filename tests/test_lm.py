"""Laws of the door to a language model, over every architecture of `zoo.py` and our own decoder; and what it says when it stays shut."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast

from graven.errors import ModelError, ShapeError, TextError
from graven.layers.decoder import DecoderSpec
from graven.lm import Pretrained, Small, load_pretrained
from graven.lm.base import canonical, greedy, in_front
from graven.memory.gradient import SGD, Adam, GradMem, GradMemSpec
from graven.tasks.base import Tokens

SMALL = {"small": {"tied": True}, "small, convolution": {"convolution": 3}}
MODELS = [*zoo.ZOO, *SMALL]
LENGTHS = [9, 2, 5, 0]
POSITIONLESS = ["bloom", "falcon", "mpt", "mamba", "mamba2", "jamba"]
TOLERANCE = 2e-5  # standard deviations of what is expected; float32 through two layers at batches of other sizes
STORIES = Path(__file__).parents[1] / "../shared/data/stories260K"


@cache
def door(name):
    """A model of the table; no test changes one."""
    if name not in SMALL:
        return zoo.pretrained(name)
    spec = {"vocabulary": zoo.VOCABULARY, "width": 32, "layers": 2, "heads": 4, "key_value_heads": 2, "hidden": 48}
    model = Small(DecoderSpec(**(spec | SMALL[name])), name=name)
    zoo.redraw(model, seed=1)
    return model


@pytest.fixture(params=MODELS)
def model(request):
    return door(request.param)


@pytest.fixture
def rows(generator):
    """Token ids of ragged rows, one of them empty."""
    return [torch.randint(zoo.VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def padded(rows, *, where, generator):
    """The rows at width 12 with their real tokens on the right, on the left or scattered; other tokens stand at the padding."""
    ids = torch.randint(zoo.VOCABULARY, (len(rows), 12), generator=generator)
    mask = torch.zeros(len(rows), 12, dtype=torch.bool)
    for i, row in enumerate(rows):
        scattered = torch.randperm(12, generator=generator)[: len(row)].sort().values
        at = {"right": torch.arange(len(row)), "left": torch.arange(12 - len(row), 12), "interior": scattered}[where]
        ids[i, at], mask[i, at] = torch.tensor(row, dtype=torch.long), True
    return Tokens(ids, mask)


def assert_same(got, expected, *, tolerance=TOLERANCE):
    """Equal to within so many standard deviations of what is expected."""
    assert got.shape == expected.shape
    off = float((got - expected).abs().max() / expected.std())
    assert off <= tolerance, f"off by {off:.2g} standard deviations"


def test_assert_same_fails_on_a_difference():
    x = torch.linspace(-1, 1, 9)
    with pytest.raises(AssertionError, match="off by"):
        assert_same(x + 1e-3, x)


@torch.no_grad()
def run(model, tokens, *, embeddings=None):
    return model.hidden(model.embed(tokens) if embeddings is None else embeddings, mask=tokens.mask)


# Embeddings, hidden states, logits


@pytest.mark.parametrize("name", zoo.ZOO)
def test_logits_of_hidden_states_of_embeddings_are_the_logits_of_the_ids(name, generator):
    model, ids = door(name), torch.randint(zoo.VOCABULARY, (2, 9), generator=generator)
    with torch.no_grad():
        expected = zoo.architecture(name)(input_ids=ids, use_cache=False).logits
        assert_same(model.logits(run(model, Tokens.full(ids))), expected)


def test_sizes_and_scale_are_those_of_the_tensors(model):
    every = Tokens.full(torch.arange(zoo.VOCABULARY)[:, None])
    embedded, hidden = model.embed(every), run(model, every)
    assert embedded.shape == (zoo.VOCABULARY, 1, model.width)
    assert hidden.shape == (zoo.VOCABULARY, 1, model.hidden_width)
    assert model.logits(hidden).shape == (zoo.VOCABULARY, 1, model.vocabulary)
    assert model.head_weight.shape == (model.vocabulary, model.hidden_width)
    if model.name != "small, convolution":  # adds to the token embeddings, whose scale is meant
        assert model.embedding_scale == pytest.approx(float(embedded.detach().std()), rel=1e-5)


@pytest.mark.parametrize("where", ["right", "left", "interior"])
def test_padding_changes_no_hidden_state_and_rows_do_not_meet(model, where, rows, generator):
    tokens = padded(rows, where=where, generator=generator)
    hidden = run(model, tokens)
    noise = torch.randn(*tokens.ids.shape, model.width, generator=generator)
    beside = run(model, tokens, embeddings=torch.where(tokens.mask[..., None], model.embed(tokens).detach(), noise))
    for i, row in enumerate(rows):
        if row:
            alone = run(model, Tokens.full(torch.tensor([row])))[0]
            assert_same(hidden[i][tokens.mask[i]], alone)
            assert_same(beside[i][tokens.mask[i]], alone)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in [*POSITIONLESS, "lfm2"]])  # lfm2's convolution sees what is hidden
def test_explicit_positions_are_those_of_a_longer_row_whose_other_columns_are_hidden(name, generator):
    model, length, at = door(name), 8, torch.tensor([0, 1, 4, 5, 7])  # 8 columns fit into the sliding windows
    whole = torch.randn(1, length, model.width, generator=generator)
    seen = torch.zeros(1, length, dtype=torch.bool).index_fill(1, at, True)
    with torch.no_grad():
        if isinstance(model, Small):
            expected = model.decoder.hidden(whole, mask=(seen[:, None] & torch.ones(length, length, dtype=torch.bool).tril()))
        else:
            positions = torch.arange(length)[None]
            expected = model.model.base_model(inputs_embeds=whole, attention_mask=seen.long(), position_ids=positions).last_hidden_state
        assert_same(model.hidden(whole[:, at], positions=at[None]), expected[:, at])
        # the same beside a shorter row, with padding whose position no table holds
        mask = torch.tensor([[True, False, True, False, True, True, False, True], [True] + 7 * [False]])
        positions = torch.full(mask.shape, 10**6).masked_scatter(mask, torch.cat([at, at[:1]]))
        embeddings = torch.zeros(2, length, model.width).masked_scatter(mask[..., None], torch.cat([whole[0, at], whole[0, :1]]))
        hidden = model.hidden(embeddings, mask=mask, positions=positions)
        assert_same(hidden[0, mask[0]], expected[0, at])
        assert_same(hidden[1, 0], expected[0, 0])


@pytest.mark.parametrize("name", POSITIONLESS)
def test_a_model_without_positions_refuses_them_by_name(name):
    model = door(name)
    with pytest.raises(ModelError, match=rf"^{name} \(\w+ForCausalLM\) .* ignores any that are given; leave `positions` out.$"):
        model.hidden(torch.zeros(1, 3, model.width), positions=torch.tensor([[0, 2, 5]]))


def test_another_width_is_refused(model):
    with pytest.raises(ShapeError, match="embeddings"):
        model.hidden(torch.zeros(1, 3, model.width + 1))


def test_columns_beyond_the_positions_of_a_model_are_refused_and_the_last_one_is_taken():
    model, prefix, query = door("gpt2"), torch.zeros(1, 5, 32), Tokens.full(torch.arange(9)[None])
    assert model.hidden(torch.zeros(1, zoo.COLUMNS, 32)).shape == (1, zoo.COLUMNS, 32)
    padded_row = torch.arange(zoo.COLUMNS + 1)[None] > 0
    assert model.hidden(torch.zeros(1, zoo.COLUMNS + 1, 32), mask=padded_row).shape == (1, zoo.COLUMNS + 1, 32)
    assert len(model.generate(prefix, query, most=51, stop=())[0].tokens) == 51
    with pytest.raises(TextError, match=r"take 65 columns, and gpt2 \(GPT2LMHeadModel\) has positions for 64"):
        model.hidden(torch.zeros(1, zoo.COLUMNS + 1, 32))
    with pytest.raises(TextError, match="take 65 columns"):
        model.generate(prefix, query, most=52, stop=())


def test_what_runs_with_the_real_columns_in_front_comes_back_where_it_stood():
    mask = torch.tensor([[False, True, False, True], [True, True, True, False]])
    x = torch.arange(8.0).view(2, 4, 1)
    cumulated = in_front(lambda x, _: x.cumsum(1), x, mask=mask)[..., 0]
    assert cumulated[mask].tolist() == [1.0, 4.0, 4.0, 9.0, 15.0]


# Continuations


@pytest.fixture
def asked(model, rows, generator):
    """A memory of five vectors for each of the ragged queries."""
    return model.embedding_scale * torch.randn(len(rows), 5, model.width, generator=generator), padded(rows, where="interior", generator=generator)


def single(asked, i):
    prefix, query = asked
    return prefix[i : i + 1], Tokens.of([query.row(i)])


def test_ragged_queries_behind_a_memory_continue_like_single_ones_and_like_the_plain_loop(model, asked):
    together = model.generate(*asked, most=6, stop=())
    for i, row in enumerate(together):
        (alone,) = model.generate(*single(asked, i), most=6, stop=())
        (plain,) = greedy(model, *single(asked, i), most=6, stop=(), head=model.logits)
        assert row.tokens == alone.tokens == plain.tokens
        assert len(row.tokens) == 6
        assert row.log_probabilities == pytest.approx(alone.log_probabilities, abs=1e-4)
        assert row.log_probabilities == pytest.approx(plain.log_probabilities, abs=1e-4)


def test_log_probabilities_are_those_of_teacher_forcing(model, asked):
    for i, row in enumerate(model.generate(*asked, most=6, stop=())):
        prefix, query = single(asked, i)
        with torch.no_grad():
            whole = torch.cat([prefix, model.embed(Tokens.of([query.row(0) + row.tokens]))], dim=1)
            expected = model.logits(model.hidden(whole))[0, -7:-1].log_softmax(-1)
        assert expected.argmax(-1).tolist() == row.tokens
        assert row.log_probabilities == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


def test_a_row_ends_before_its_first_stop_token_whose_probability_comes_last(model, asked):
    free = model.generate(*asked, most=6, stop=())
    stop = {free[0].tokens[2], free[1].tokens[4]}
    for row, whole in zip(model.generate(*asked, most=6, stop=stop), free, strict=True):
        length = next((at for at, token in enumerate(whole.tokens) if token in stop), 6)
        assert row.tokens == whole.tokens[:length]
        assert row.log_probabilities == pytest.approx(whole.log_probabilities[: length + 1], abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "small"])
def test_no_tokens_are_written_where_none_are_asked_for(name):
    model, query = door(name), Tokens.of([[1, 2], []])
    assert [row.tokens + row.log_probabilities for row in model.generate(torch.ones(2, 5, 32), query, most=0, stop=())] == [[], []]


def test_generation_settings_of_a_model_do_not_leak_in(generator):
    clean, raw = door("llama"), zoo.architecture("llama")
    asked = torch.randn(3, 4, 32, generator=generator), Tokens.of([[5, 6], [7], []])
    expected = clean.generate(*asked, most=8, stop=())
    raw.generation_config = GenerationConfig(
        do_sample=True,
        temperature=9.0,
        top_k=3,
        repetition_penalty=4.0,
        no_repeat_ngram_size=1,
        min_new_tokens=8,
        eos_token_id=expected[0].tokens[:2],
    )
    model = Pretrained(raw, zoo.tokenizer(), name="llama")
    assert model.stop == set(expected[0].tokens[:2])
    assert [row.tokens for row in model.generate(*asked, most=8, stop=())] == [row.tokens for row in expected]


# Tokens and text


def byte_pairs():
    """A byte-level tokenizer that adds tokens on either side where it is asked to, and knows "he" and " s"."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġs"])}
    backend = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("Ġ", "s")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("text", ["", "she 's here , ok .", "  two\n\tlines ", "<s>naïve</s> \N{SNOWMAN} 日本"])
def test_a_text_survives_its_tokens(text):
    raw = zoo.build("LlamaConfig", zoo.LLAMA | {"vocab_size": 260}, seed=0)
    model = Pretrained(raw, byte_pairs(), name="bytes")
    assert model.decode(model.encode(text)) == text


def test_decoding_tidies_nothing_up_whatever_the_tokenizer_is_set_to():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"it": 0, "'s": 1, ".": 2})), clean_up_tokenization_spaces=True)
    assert tokenizer.decode([0, 1, 2]) == "it's."
    assert Pretrained(zoo.architecture("llama"), tokenizer, name="llama").decode([0, 1, 2]) == "it 's ."


def test_encoding_adds_no_tokens_of_its_own():
    model = Pretrained(zoo.build("LlamaConfig", zoo.LLAMA | {"vocab_size": 260}, seed=0), byte_pairs(), name="bytes")
    assert model.tokenizer("he")["input_ids"] == [0, 258, 1]
    assert model.encode("he") == [258]


def test_a_token_that_the_model_has_no_embedding_of_is_refused():
    model = Pretrained(zoo.architecture("llama"), zoo.tokenizer(words=100), name="llama")
    assert model.encode("w95") == [95]
    with pytest.raises(ModelError, match=r"the tokenizer of llama \(LlamaForCausalLM\) gives token 97 and the model knows 96"):
        model.encode("w3 w97")


# Loading


@pytest.fixture
def saved(tmp_path):
    """A directory that holds a Llama and its tokenizer."""
    zoo.architecture("llama").save_pretrained(tmp_path / "model")
    zoo.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_comes_back_as_it_was(saved, generator):
    model, ids = load_pretrained(str(saved)), torch.randint(zoo.VOCABULARY, (2, 9), generator=generator)
    assert torch.equal(run(model, Tokens.full(ids)), run(door("llama"), Tokens.full(ids)))
    assert (model.encode("w5 w7"), model.decode([5, 7])) == ([5, 7], "w5 w7")
    assert (model.name, model.revision, model.stop, model.positions) == (str(saved), None, {2}, zoo.COLUMNS)
    assert model.fingerprint == door("llama").fingerprint
    assert not model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_that_was_asked_for(saved, dtype):
    model = load_pretrained(str(saved), dtype=dtype)
    hidden = model.hidden(torch.ones(1, 3, 32))
    assert {parameter.dtype for parameter in model.parameters()} == {hidden.dtype} == {getattr(torch, dtype)}


def test_a_model_in_shards_is_loaded_whole(tmp_path):
    zoo.architecture("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    zoo.tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(load_pretrained(str(tmp_path)).head_weight, door("llama").head_weight)


def without(*names):
    return lambda path: [(path / name).unlink() for name in names]


def holding(name, text):
    return lambda path: (path / name).write_text(text)


def cut_off(path):
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def tensors(change):
    def apply(path):
        held = load_file(path / "model.safetensors")
        change(held)
        save_file(held, path / "model.safetensors", metadata={"format": "pt"})

    return apply


NORM = "model.layers.1.input_layernorm.weight"
BROKEN = {
    "no config": (without("config.json"), "holds no model: it has no config.json"),
    "config is no JSON": (holding("config.json", '{"model_ty'), "not a valid JSON file"),
    "config names no architecture": (holding("config.json", "{}"), "Unrecognized model"),
    "unknown architecture": (holding("config.json", '{"model_type": "nonsense"}'), "does not recognize this architecture"),
    "no language model": (holding("config.json", '{"model_type": "t5"}'), "Unrecognized configuration class"),
    "wrong type in config": (holding("config.json", '{"model_type": "llama", "vocab_size": "many"}'), "vocab_size"),
    "no weights": (without("model.safetensors"), "no file named model.safetensors"),
    "empty weights": (holding("model.safetensors", ""), "header too small"),
    "weights cut off": (cut_off, "incomplete metadata, file not fully covered"),
    "weights of nonsense": (holding("model.safetensors", "nonsense" * 9), "header too large"),
    "a weight is missing": (tensors(lambda held: held.pop(NORM)), f"lacks 1 of its weights, {NORM} among them"),
    "a weight has another shape": (tensors(lambda held: held.update({NORM: torch.zeros(3)})), rf"{NORM} has shape \(3,\) .* asks for \(32,\)"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer that can be read"),
    "only settings of a tokenizer": (without("tokenizer.json"), "has no tokenizer that can be read"),
    "tokenizer is no JSON": (holding("tokenizer.json", '{"version":'), "has no tokenizer that can be read"),
    "tokenizer is another JSON": (holding("tokenizer.json", '{"added_tokens": [], "model": {"type": "x"}}'), "has no tokenizer that can be read"),
    "settings of a tokenizer are a list": (holding("tokenizer_config.json", "[]"), "has no tokenizer that can be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_directory_that_is_not_whole_is_refused_in_one_line(case, saved):
    damage, sentence = BROKEN[case]
    damage(saved)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_pretrained(str(saved))
    said = str(caught.value)
    assert str(saved) in said
    assert "\n" not in said
    assert said.endswith(".")


def test_code_that_comes_with_a_model_is_never_run(saved, tmp_path):
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ModelError, match="custom code"):
        load_pretrained(str(saved))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "there is no directory ''"),
        ("/no/such/model", "there is no directory '/no/such/model'"),
        ("./model", "there is no directory './model'"),
        ("a/b/c", "there is no directory 'a/b/c'"),
        ("two words", "no such model on the hub; check the spelling"),
        ("no/such.gguf", "there is no file no/such.gguf"),
        ("graven/absent", "cannot load graven/absent: it is not on this machine and the hub cannot be reached; give the path"),
        (__file__, "is a file and no GGUF file"),
    ],
)
def test_a_path_without_a_model_is_refused_in_one_line(path, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        load_pretrained(path)
    assert "\n" not in str(caught.value)


# What a probe refuses


def test_embeddings_that_are_scaled_inside_are_refused():
    settings = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    raw = zoo.build("FalconH1Config", zoo.LLAMA | settings | {"embedding_multiplier": 5.0}, seed=0)
    with pytest.raises(ModelError, match=r"^h1 \(FalconH1ForCausalLM\) scales or augments its embeddings inside, .* Use another model.$"):
        Pretrained(raw, zoo.tokenizer(), name="h1")


def test_embeddings_that_are_augmented_inside_are_refused():
    settings = {
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": zoo.VOCABULARY,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["full_attention"] * 2,
    }
    raw = zoo.build("Gemma3nTextConfig", zoo.WIDE | settings, seed=0)  # a new model's correct_output_scale is 0 and would hide the fault
    with pytest.raises(ModelError, match=r"^3n \(Gemma3nForCausalLM\) scales or augments its embeddings inside"):
        Pretrained(raw, zoo.tokenizer(), name="3n")


def test_a_head_that_does_more_than_graven_knows_is_refused():
    settings = {"lru_width": 32, "attention_window_size": 8, "block_types": ("recurrent", "attention"), "logits_soft_cap": 1.0}
    raw = zoo.build("RecurrentGemmaConfig", zoo.WIDE | settings, seed=0)
    with pytest.raises(ModelError, match=r"^rg \(RecurrentGemmaForCausalLM\) has a head that graven does not know"):
        Pretrained(raw, zoo.tokenizer(), name="rg")


def test_a_model_whose_columns_see_later_ones_is_refused():
    raw = zoo.build("Gemma3TextConfig", zoo.WIDE | {"use_bidirectional_attention": True}, seed=0)
    with pytest.raises(ModelError, match=r"^both \(Gemma3ForCausalLM\) lets a column see later ones"):
        Pretrained(raw, zoo.tokenizer(), name="both")


def test_a_model_that_takes_no_embeddings_is_refused():
    settings = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 2}
    raw = zoo.build("CpmAntConfig", zoo.ENDS | settings, seed=0)
    with pytest.raises(ModelError, match=r"^ant \(CpmAntForCausalLM\) does not run from embeddings"):
        Pretrained(raw, zoo.tokenizer(), name="ant")


# Fingerprints


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_fingerprint_survives_saving_and_loading_in_any_dtype(name, tmp_path):
    zoo.architecture(name).save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    expected = load_pretrained(str(tmp_path)).fingerprint
    again = load_pretrained(str(tmp_path), dtype="bfloat16")
    assert again.fingerprint == expected
    again.model.save_pretrained(tmp_path)
    again.tokenizer.save_pretrained(tmp_path)
    assert load_pretrained(str(tmp_path), attention="eager").fingerprint == expected


def test_a_fingerprint_does_not_depend_on_what_the_tokenizer_did_last(saved):
    model = load_pretrained(str(saved))
    before, tokenizer = model.fingerprint, model.tokenizer
    tokenizer(["w1 w2", "w3"], padding=True, truncation=True, max_length=1)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["truncation"] is not None
    assert model.fingerprint == before


def test_fingerprints_tell_embeddings_tokenizers_and_configurations_apart():
    other = zoo.architecture("llama")
    other.get_input_embeddings().weight.data += 0.1
    models = [
        door("llama"),
        Pretrained(other, zoo.tokenizer(), name="llama"),
        Pretrained(zoo.architecture("llama"), zoo.tokenizer(words=95), name="llama"),
        Pretrained(zoo.build("LlamaConfig", zoo.LLAMA | {"rms_norm_eps": 1e-5}, seed=0), zoo.tokenizer(), name="llama"),
        door("small"),
        door("small, convolution"),
    ]
    assert len({model.fingerprint for model in models}) == len(models)


def test_a_canonical_configuration_forgets_precision_at_every_depth_and_nothing_else():
    config = {"width": 8, "dtype": "float32", "text": {"dtype": "bfloat16", "layers": [1, 2]}}
    assert json.loads(canonical(config)) == {"width": 8, "text": {"layers": [1, 2]}}


# A memory behind a Hugging Face model


@pytest.mark.parametrize(
    ("name", "attention", "expected"), [("llama", "sdpa", False), ("llama", "eager", True), ("gpt2", "eager", True), ("mamba", None, True)]
)
def test_a_model_tells_whether_it_can_be_differentiated_twice(name, attention, expected):
    assert zoo.pretrained(name, attention=attention).twice_differentiable is expected


def test_our_decoder_can_be_differentiated_twice():
    assert door("small").twice_differentiable


CONTEXTS, QUERIES, TARGETS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]], [[5, 6], [11]], [7, 12]


def reconstruction(raw, memory, context):
    """Mean loss of one context behind one memory."""
    embedded = raw.get_input_embeddings()(torch.tensor(context))
    logits = raw(inputs_embeds=torch.cat([memory, embedded])[None], use_cache=False).logits[0, len(memory) - 1 : -1]
    return F.cross_entropy(logits, torch.tensor(context))


def test_the_meta_gradient_through_two_steps_of_a_write_is_that_of_the_steps_unrolled_by_hand():
    model = zoo.pretrained("llama", attention="eager")
    raw, memory = model.model, GradMem(model, GradMemSpec(slots=3, steps=2, rule=SGD(rate=0.5), order="second"))
    learned = [memory.initial, raw.model.layers[0].self_attn.q_proj.weight, raw.model.embed_tokens.weight, raw.lm_head.weight]

    state = memory.write(memory.start(2), Tokens.of(CONTEXTS))
    last = memory.read(state, Tokens.of(QUERIES))[torch.arange(2), [2, 1]]
    got = torch.autograd.grad(F.cross_entropy(last, torch.tensor(TARGETS), reduction="sum"), learned)

    loss = torch.zeros(())
    for context, query, target in zip(CONTEXTS, QUERIES, TARGETS, strict=True):
        slots = memory.initial
        for _ in range(2):
            (gradient,) = torch.autograd.grad(reconstruction(raw, slots, context), slots, create_graph=True)
            slots = slots - 0.5 * gradient
        whole = torch.cat([slots, raw.get_input_embeddings()(torch.tensor(query))])
        loss = loss + F.cross_entropy(raw(inputs_embeds=whole[None], use_cache=False).logits[0, -1], torch.tensor(target))
    for mine, expected in zip(got, torch.autograd.grad(loss, learned), strict=True):
        assert float((mine - expected).norm() / expected.norm()) < 1e-5


def test_a_frozen_model_with_its_usual_attention_is_written_to_by_adam():
    model = zoo.pretrained("llama")
    memory = GradMem(model, GradMemSpec(slots=3, steps=5, rule=Adam(rate=0.05), order="none"))
    state = memory.write(memory.start(2), Tokens.of(CONTEXTS))
    for got, context in zip(state, CONTEXTS, strict=True):
        slots = memory.initial.detach().clone().requires_grad_()
        adam = torch.optim.Adam([slots], lr=0.05, betas=(0.9, 0.95))
        for _ in range(5):
            adam.zero_grad()
            reconstruction(model.model, slots, context).backward()
            adam.step()
        assert_same(got.detach(), slots.detach(), tolerance=1e-4)


# Real models


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the model stories260K in ../shared/data")
def test_a_trained_model_tells_its_story_from_a_prefix_in_any_batch():
    model = load_pretrained(str(STORIES))
    openings = ["Once upon a time", "Tom and", "The dog"]
    queries = [model.encode(text) for text in openings]
    start = model.embed(Tokens.of([[1]])).detach().expand(3, -1, -1)  # <s>, which opened every text in its training
    together = model.generate(start, Tokens.of(queries), most=12, stop=())
    for i, query in enumerate(queries):
        assert model.generate(start[:1], Tokens.of([query]), most=12, stop=())[0].tokens == together[i].tokens
    assert model.decode(queries[0] + together[0].tokens).startswith("Once upon a time, there was a little girl named Lily")


def write_gguf(path, raw):
    """A Llama in a GGUF file, with a byte-level tokenizer of 96 tokens."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    config, writer = raw.config, gguf.GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_rope_dimension_count, config.head_dim),
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, [*map(chr, range(33, 127)), "Ġ", "ĠA"]),
        (writer.add_token_merges, ["Ġ A"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
    ):
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in raw.state_dict().items():
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:  # rotary pairs stand side by side in a GGUF file, half a head apart in transformers
                weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_loaded_with_its_tokenizer(tmp_path, generator):
    write_gguf(tmp_path / "tiny.gguf", zoo.architecture("llama"))
    model, ids = load_pretrained(str(tmp_path / "tiny.gguf")), torch.randint(zoo.VOCABULARY, (2, 9), generator=generator)
    assert_same(run(model, Tokens.full(ids)), run(door("llama"), Tokens.full(ids)))
    assert (model.encode("B A"), model.decode([33, 95])) == ([33, 95], "B A")


@pytest.mark.parametrize("content", [b"", b"nonsense" * 9, b"GGUF" + b"\0" * 3, b"GGUF\3\0\0\0" + b"\xff" * 60])
def test_a_file_that_is_no_gguf_file_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "not.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"not\.gguf") as caught:
        load_pretrained(str(tmp_path / "not.gguf"))
    assert "\n" not in str(caught.value)


def test_a_model_that_generates_from_tokens_only_is_refused_at_load():
    raw = zoo.architecture("llama")
    raw.prepare_inputs_for_generation = lambda input_ids: {"input_ids": input_ids}
    with pytest.raises(ModelError, match="generates from tokens and not from vectors"):
        Pretrained(raw, zoo.tokenizer(), name="tiny")


def test_positions_of_mpt_have_an_end_too():
    assert zoo.pretrained("mpt").positions == zoo.COLUMNS
