"""A value model comes from the policy or a folder, and goes back to one that transformers reads."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from gnomon.core.errors import ModelError
from gnomon.models import default
from gnomon.models.critic import HEAD_FILE, CausalCritic, ValueScorer, check_critic, head_for, load_critic, write_critic
from gnomon.models.load import write_model
from gnomon.models.lora import merged_tensors
from gnomon.models.place import BUILT_IN
from gnomon.models.tiny import save_tiny, tiny_model, tiny_tokenizer

TOKENS = torch.tensor([[7, 8, 9, 10], [7, 8, 11, 12]])


def values_of(critic, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    rows = len(tokens)
    prompts, lengths = torch.full((rows,), 2), torch.full((rows,), 4)
    return ValueScorer(critic, critic.score)(tokens, prompts, lengths, torch.ones(rows, 2, dtype=torch.bool)).values


def with_opinion(critic):
    torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(1))
    return critic


def reward_model(labels: int = 1, **changes) -> torch.nn.Module:
    config = tiny_model().config
    config.num_labels = labels
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    return hf.LlamaForSequenceClassification(config)


def plain(critic) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in critic.named_parameters()}


def is_identical(one, other) -> bool:
    a, b = plain(one), plain(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_critic_begins_as_the_policy_with_a_head_of_zeros():
    """The trunk has the policy's weights and none of its memory; the head is zero; it is in eval mode."""
    critic, policy = load_critic("tiny", "policy"), tiny_model(0)

    trunk = dict(critic.base_model.named_parameters())
    assert isinstance(critic, hf.LlamaForSequenceClassification)
    assert all(torch.equal(trunk[name], p) for name, p in policy.model.named_parameters())
    assert not critic.score.weight.any()
    assert critic.score.bias is None
    assert not critic.training
    assert critic.config.num_labels == 1


def test_a_critic_of_a_folder_model_begins_with_its_weights(tmp_path):
    """`policy` means the run's model, here a folder."""
    folder = save_tiny(tmp_path, seed=3)

    critic = load_critic(str(folder), "policy", torch.bfloat16)

    assert torch.equal(
        critic.base_model.embed_tokens.weight, tiny_model(3, dtype=torch.bfloat16).model.embed_tokens.weight
    )
    assert critic.score.weight.dtype == torch.float32


@pytest.mark.slow
def test_the_default_model_can_be_a_critic():
    """The built-in name works as any folder does."""
    critic = load_critic(default.NAME, "policy", torch.bfloat16)

    assert not values_of(critic).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_is_read_by_us_and_by_transformers(tmp_path, dtype):
    """Saved and loaded, a critic says what it said, and transformers finds every weight of a one-label classifier."""
    name = str(save_tiny(tmp_path / "policy"))
    critic = with_opinion(load_critic(name, "policy", dtype))
    critic.score.weight.data = critic.score.weight.data.to(dtype).float()
    write_critic(critic, tmp_path / "critic")

    loaded = load_critic(name, str(tmp_path / "critic"), dtype)
    theirs, loading = hf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", dtype=dtype, output_loading_info=True
    )

    assert torch.equal(values_of(loaded), values_of(critic))
    assert is_identical(loaded, critic)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    # Two ways through bfloat16 differ by 0.8% of a hidden state: a single value by anything up to a tenth.
    tokens = torch.randint(5, 30, (64, 4), generator=torch.Generator().manual_seed(0))
    said, ours = theirs.eval()(input_ids=tokens[:, :3]).logits[:, 0].float(), values_of(critic, tokens)[:, 1]
    assert (said - ours).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * said.norm()


def test_a_reward_model_keeps_its_head(tmp_path):
    """A one-label classifier of anyone is a critic as it is."""
    model = reward_model().eval()
    model.save_pretrained(tmp_path)

    critic = load_critic("tiny", str(tmp_path))

    assert is_identical(critic, model)
    assert critic.score.weight.any()


def granite(folder):
    """An architecture that transformers has no classifier of."""
    config = hf.GraniteConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    hf.GraniteForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save(folder)
    return str(folder)


def test_an_architecture_without_a_classifier_has_its_decoder_and_our_head(tmp_path):
    """It is saved as the language model with the head beside it, and comes back bit for bit."""
    name = granite(tmp_path / "granite")
    critic = with_opinion(load_critic(name, "policy"))
    write_critic(critic, tmp_path / "critic")

    loaded = load_critic(name, str(tmp_path / "critic"))

    assert isinstance(critic, CausalCritic)
    assert values_of(critic).any()
    assert torch.equal(values_of(loaded), values_of(critic))
    assert is_identical(loaded, critic)


def test_the_own_head_of_a_language_model_is_not_trained_as_a_critic():
    """An untied head that no value passes through needs no gradient and no master; a tied one is the embedding."""
    config = tiny_model().config
    config.tie_word_embeddings = False
    untied, tied = hf.LlamaForCausalLM(config), tiny_model()

    critics = [CausalCritic(model, head_for(model)) for model in (untied, tied)]

    assert not critics[0].model.lm_head.weight.requires_grad
    assert critics[0].model.model.embed_tokens.weight.requires_grad
    assert critics[1].model.lm_head.weight.requires_grad


@pytest.mark.parametrize("place", ["critic", "."])
def test_a_policy_saved_with_its_value_head_can_be_a_critic(tmp_path, place):
    """What a run with a shared trunk saved begins another run's separate critic; the head was once beside the trunk."""
    policy = tiny_model(3)
    head = head_for(policy)
    torch.nn.init.normal_(head.weight)
    write_model(merged_tensors(policy), policy.config, tmp_path, policy.generation_config)
    write_critic(head, tmp_path / place)

    critic = load_critic("tiny", str(tmp_path))

    assert torch.equal(values_of(critic), values_of(CausalCritic(policy, head)))
    assert values_of(critic).any()


def test_a_separate_critic_lends_its_head_to_no_policy(tmp_path):
    """A checkpoint with a critic of its own is a policy, and the critic is in its folder."""
    policy = tiny_model(3)
    write_model(merged_tensors(policy), policy.config, tmp_path, policy.generation_config)
    write_critic(CausalCritic(tiny_model(4), head_for(policy)), tmp_path / "critic")

    with pytest.raises(ModelError, match=r"is no value model.*There is one in .*critic$"):
        load_critic("tiny", str(tmp_path))
    assert isinstance(load_critic("tiny", str(tmp_path / "critic")), CausalCritic)


def encoder() -> torch.nn.Module:
    config = hf.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    return hf.BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tiny_model, r"is no value model but \['LlamaForCausalLM'\]"),
        (lambda: reward_model(2), "has 2 labels; a value is one number"),
        (lambda: reward_model(vocab_size=258, pad_token_id=0), "knows 258 tokens, the model 'tiny' has 259"),
        (encoder, "BertForSequenceClassification.* has no linear head 'score'"),
    ],
    ids=["language model", "two labels", "fewer tokens", "encoder"],
)
def test_what_is_no_value_model_is_refused(tmp_path, build, message):
    """The message says which folder and why."""
    build().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_critic("tiny", str(tmp_path))


def test_a_critic_with_other_words_is_refused(tmp_path):
    """As many tokens, but 'a' has another number: its tokenizer says so. One fits all the tiny models."""
    reward_model().save_pretrained(tmp_path)
    tiny_tokenizer().save(tmp_path)
    for name in BUILT_IN[:-1]:
        check_critic(name, str(tmp_path))
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))

    with pytest.raises(ModelError, match=r"another vocabulary .* token '[ab]' is 9[78] there and 9[78] here"):
        check_critic("tiny", str(tmp_path))


def test_a_missing_folder_is_named(tmp_path):
    """One that does not exist, and one without a config."""
    with pytest.raises(ModelError, match="nowhere' does not exist"):
        check_critic("tiny", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_critic("tiny", str(tmp_path))


@pytest.mark.parametrize("given", [".", "checkpoints/step-4"])
def test_a_run_or_a_checkpoint_in_place_of_its_critic_is_led_there(tmp_path, given):
    """The message says where in it the critic lies."""
    checkpoint = tmp_path / "checkpoints/step-4"
    save_tiny(checkpoint)
    write_critic(load_critic("tiny", "policy"), checkpoint / "critic")

    with pytest.raises(ModelError, match=r"There is one in .*checkpoints/step-4/critic$"):
        check_critic("tiny", str(tmp_path / given))
    check_critic("tiny", str(checkpoint / "critic"))


def test_weights_that_do_not_fit_are_refused(tmp_path):
    """No weights; weights without a head; a head of another width."""
    model = reward_model()
    model.config.architectures = ["LlamaForSequenceClassification"]
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_critic("tiny", str(tmp_path))

    trunk = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    save_file(trunk, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight \(score.weight\), which would begin at random"):
        load_critic("tiny", str(tmp_path))

    save_tiny(tmp_path / "shared")
    save_file({"score.weight": torch.zeros(1, 5)}, tmp_path / "shared" / HEAD_FILE)
    with pytest.raises(ModelError, match="reads 5 numbers, its trunk has 64"):
        load_critic("tiny", str(tmp_path / "shared"))


def test_a_reward_model_that_was_cut_short_is_refused_before_a_weight_is_read(tmp_path):
    """Its header says how long the file should be; the message names the file."""
    write_critic(load_critic("tiny", "policy"), tmp_path)
    whole = tmp_path / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-100])

    with pytest.raises(ModelError, match=r"model\.safetensors' is damaged"):
        check_critic("tiny", str(tmp_path))
