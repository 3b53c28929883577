"""A sequence classifier or a value head gives rewards, as transformers itself scores the same conversation."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import gnomon
from gnomon.core.errors import ConfigError, GradingError, ModelError
from gnomon.models.critic import CausalCritic, head_for, write_critic
from gnomon.models.tiny import save_tiny, tiny_model, tiny_tokenizer
from gnomon.rewards.base import Sample
from gnomon.rewards.exact import Numeric
from gnomon.rewards.grader_pool import GradingPool, Scorer
from gnomon.rewards.grading import Grading, WeightedReward
from gnomon.rewards.model import RewardModel
from gnomon.training.reward_models import check_reward_models, load_scorer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ANSWERS = ["2", "It is three, I think.", "", "<|eos|>assistant: perfect"]
SAMPLES = [Sample("1 + 1 =", answer, columns={"answer": "2"}) for answer in ANSWERS]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.backend.chat_template = template
    tokenizer.save(folder)
    return folder


def classifier(folder: Path, labels: int = 1, template: str | None = TEMPLATE, pad: int | None = None) -> Path:
    """Write a tiny Llama classifier with random weights."""
    config = tiny_model().config
    config.num_labels, config.pad_token_id = labels, pad
    torch.manual_seed(5)
    hf.LlamaForSequenceClassification(config).save_pretrained(folder)
    return write_tokenizer(folder, template)


def encoder(folder: Path) -> Path:
    """Write a tiny BERT classifier without a chat template."""
    config = hf.BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, num_labels=1, pad_token_id=258,
    )  # fmt: skip
    torch.manual_seed(6)
    hf.BertForSequenceClassification(config).save_pretrained(folder)
    return write_tokenizer(folder, None)


def settings(folder: Path, **changes) -> RewardModel:
    return RewardModel(str(folder), precision="fp32", device="cpu", **changes)


def load_reward_model(reward: RewardModel):
    """Return what gives answers their scores alone."""
    scorer = load_scorer(reward)
    return lambda samples: [found if isinstance(found, str) else found[""] for found in scorer(samples)]


def checked(reward: RewardModel) -> None:
    check_reward_models([Grading((WeightedReward(reward),))])


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return what transformers gives one sequence by itself, in float32."""
    network = hf.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0].double()


def chat_ids(answer: str, question: str = "1 + 1 =") -> list[int]:
    """Return a chat with every text of it as bytes, so that none is a control token."""
    return [256, *f"user: {question}".encode(), 257, *f"assistant: {answer}".encode(), 257]


def graded(grading: Grading, samples: list[Sample], together: bool = True):
    async def grades():
        async with GradingPool(grading, load=load_scorer) as pool:
            return await (pool.grade_together(samples) if together else asyncio.gather(*map(pool.grade, samples)))

    return asyncio.run(grades())


@pytest.mark.parametrize("pad", [None, 258])
def test_a_batch_has_the_scores_that_transformers_gives_each_conversation(tmp_path, pad):
    """With and without a padding token, for answers of other lengths, one of which is spelled like a control token."""
    folder = classifier(tmp_path, pad=pad)

    scores = load_reward_model(settings(folder, batch_size=3))(SAMPLES)

    expected = [logits_of(folder, chat_ids(answer)).item() for answer in ANSWERS]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in scores}) == len(ANSWERS)


def test_messages_of_the_dataset_and_turns_of_a_conversation_are_read(tmp_path):
    """A system message stands before the question; of a conversation every message is read."""
    folder = classifier(tmp_path)
    asked = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    said = [
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
    ]
    sample = Sample("Hi", "ignored", columns={"conversation": said}, messages=asked)

    (score,) = load_reward_model(settings(folder))([sample])

    turns = [f"{m['role']}: {m['content']}".encode() for m in (*asked, *said)]
    assert score == pytest.approx(logits_of(folder, [256, *(i for t in turns for i in (*t, 257))]).item(), abs=1e-5)


def test_a_label_is_scaled(tmp_path):
    """(sigmoid(logit) - 0.5) / 2 of the label, and its softmax among three; by name and by number."""
    folder = classifier(tmp_path, labels=3)
    logits = logits_of(folder, chat_ids("2"))

    sigmoid = load_reward_model(settings(folder, label="LABEL_1", scaling="sigmoid", mean=0.5, std=2.0))(SAMPLES[:1])
    softmax = load_reward_model(settings(folder, label="2", scaling="softmax"))(SAMPLES[:1])

    assert sigmoid == [pytest.approx((logits[1].sigmoid().item() - 0.5) / 2, abs=1e-6)]
    assert softmax == [pytest.approx(logits.softmax(0)[2].item(), abs=1e-6)]


def test_an_encoder_reads_a_pair_of_texts(tmp_path):
    """Without a chat template, question and answer are the tokenizer's pair; its control strings stay text."""
    folder = encoder(tmp_path)

    scores = load_reward_model(settings(folder, form="pair"))([SAMPLES[0], SAMPLES[3]])

    backend = tiny_tokenizer().backend
    pairs = [backend(s.prompt, s.completion, split_special_tokens=True)["input_ids"] for s in (SAMPLES[0], SAMPLES[3])]
    assert 257 not in pairs[1]
    assert scores == pytest.approx([logits_of(folder, ids).item() for ids in pairs], abs=1e-5)


def test_a_value_head_scores_the_last_token(tmp_path):
    """A language model's folder with the head that gnomon saves beside it gives w h at the last token."""
    policy = tiny_model(0)
    critic = CausalCritic(policy, head_for(policy))
    torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(1))
    write_critic(critic, tmp_path)
    write_tokenizer(tmp_path)

    scores = load_reward_model(settings(tmp_path))(SAMPLES)

    with torch.no_grad():
        hidden = [policy.model(torch.tensor([chat_ids(a)])).last_hidden_state[0, -1] for a in ANSWERS]
        assert scores == pytest.approx([critic.score(h).item() for h in hidden], abs=1e-5)


def test_the_pool_adds_scores_to_the_other_rewards(tmp_path):
    """2 * score + right or wrong, with the parts recorded; together and one by one."""
    folder = classifier(tmp_path)
    grading = Grading((WeightedReward(settings(folder), weight=2.0), WeightedReward(Numeric())))

    grades = graded(grading, SAMPLES)

    scores = load_reward_model(settings(folder))(SAMPLES)
    assert [g.parts["model"] for g in grades] == pytest.approx(scores, abs=1e-6)
    assert [g.reward for g in grades] == pytest.approx([2 * s + r for s, r in zip(scores, [1, 0, 0, 0], strict=True)])
    assert [g.reward for g in graded(grading, SAMPLES, together=False)] == pytest.approx([g.reward for g in grades])


def test_a_model_reads_the_part_of_an_answer_that_is_judged(tmp_path):
    """With `extract` the thought is not scored, and an answer without an end of its thought earns 0."""
    folder = classifier(tmp_path)
    grading = Grading((WeightedReward(settings(folder), within="after_thinking"),))
    thought = [replace(SAMPLES[0], completion=text) for text in ("<think>hm</think>2", "<think>hm")]

    grades = graded(grading, thought)

    assert grades[0].reward == pytest.approx(logits_of(folder, chat_ids("2")).item(), abs=1e-5)
    assert grades[1].reward == 0.0


def test_a_longer_conversation_is_an_error_unless_it_is_truncated(tmp_path):
    """The error names both lengths; 'left' keeps the last tokens and 'right' the first ones."""
    folder, long = classifier(tmp_path), "9" * 100
    sample, ids = Sample("1 + 1 =", long), chat_ids(long)
    one = Grading((WeightedReward(settings(folder, max_length=40)),))

    (grade,) = graded(one, [sample])
    left, right = (
        load_reward_model(settings(folder, max_length=40, truncation=side))([sample])[0] for side in ("left", "right")
    )

    assert grade.reward is None
    assert f"model: question and answer have {len(ids)} tokens, and the reward model reads 40" in grade.error
    assert left == pytest.approx(logits_of(folder, ids[-40:]).item(), abs=1e-5)
    assert right == pytest.approx(logits_of(folder, ids[:40]).item(), abs=1e-5)


def test_what_would_score_with_new_weights_is_refused(tmp_path):
    """A language model, a classifier without its head's weights, and a built-in model; by the files alone."""
    policy = write_tokenizer(save_tiny(tmp_path / "policy"))
    headless = classifier(tmp_path / "headless")
    file = headless / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.startswith("score")}, file, {"format": "pt"})

    with pytest.raises(ModelError, match=r"has no head.*LlamaForCausalLM.*give a sequence classifier"):
        checked(settings(policy))
    with pytest.raises(ModelError, match=r"lacks 1 weight \(score.weight\), which would begin at random"):
        checked(settings(headless))
    with pytest.raises(ModelError, match="'tiny' is a language model without a head"):
        checked(settings(Path("tiny")))
    with pytest.raises(ModelError, match="does not exist"):
        checked(settings(tmp_path / "nowhere"))


def test_a_score_of_several_labels_must_be_chosen(tmp_path):
    """Several labels without `label`, an unknown one, and a softmax of one are refused with what to set."""
    several, one = classifier(tmp_path / "several", labels=3), classifier(tmp_path / "one")

    with pytest.raises(ConfigError, match=r"3 labels \(LABEL_0, LABEL_1, LABEL_2\); set label"):
        checked(settings(several))
    with pytest.raises(ConfigError, match=r"label 'LABEL_3'.*did you mean"):
        checked(settings(several, label="LABEL_3"))
    with pytest.raises(ConfigError, match="softmax of one label is 1"):
        checked(settings(one, scaling="softmax"))


def test_a_form_and_a_length_that_the_model_does_not_have_are_refused(tmp_path):
    """No chat template, more tokens than positions, and a pair that is to be cut."""
    bare = classifier(tmp_path, template=None)

    with pytest.raises(ConfigError, match="no chat template; set form = 'pair'"):
        checked(settings(bare))
    with pytest.raises(ConfigError, match="max_length = 4096, and the model reads at most 1024"):
        checked(settings(bare, form="pair", max_length=4096))
    with pytest.raises(ConfigError, match="truncation = 'left' would cut the marks"):
        settings(bare, form="pair", truncation="left")
    with pytest.raises(ConfigError, match="std"):
        settings(bare, std=0.0)


def test_an_encoder_that_counts_from_its_padding_reads_fewer_tokens(tmp_path):
    """RoBERTa's first positions are the padding's: what would lie beyond its table is an error of that answer."""
    config = hf.RobertaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=34, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    hf.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    score = load_reward_model(settings(write_tokenizer(tmp_path, None), form="pair"))

    longest, longer = score([Sample("1 + 1 =", "y" * n) for n in (25, 26)])
    assert isinstance(longest, float)
    assert longer.startswith("question and answer have 33 tokens, and the reward model reads 32")


def test_a_model_that_scores_nothing_is_refused_before_training(tmp_path):
    """BART reads its score at the last end token, and this tokenizer writes none: said as the graders start."""
    config = hf.BartConfig(
        vocab_size=259, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, num_labels=1,
        pad_token_id=258, eos_token_id=257, decoder_start_token_id=257,
    )  # fmt: skip
    hf.BartForSequenceClassification(config).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"scores no answer \(ValueError: .*<eos> token"):
        load_scorer(settings(write_tokenizer(tmp_path, None), form="pair"))


def test_a_model_that_fails_ends_the_run(tmp_path):
    """A fault of the model itself is no fault of an answer: the pool raises with what to lower."""

    class Failing(Scorer):
        def __call__(self, _):
            raise RuntimeError("out of memory")

    async def grade():
        async with GradingPool(Grading((WeightedReward(settings(tmp_path)),)), load=lambda _: Failing()) as pool:
            await pool.grade(SAMPLES[0])

    with pytest.raises(GradingError, match=r"'model' failed: .*out of memory.*lower its batch_size"):
        asyncio.run(grade())
    with pytest.raises(ConfigError, match="nothing here loads models"):
        GradingPool(Grading((WeightedReward(settings(tmp_path)),)))


def test_a_run_and_its_evaluation_record_the_scores(tmp_path, monkeypatch):
    """Each rollout has the score of its text as its reward, and held-out answers are scored too."""
    monkeypatch.chdir(tmp_path)
    folder = classifier(tmp_path / "scorer")
    reward = {"kind": "model", "model": str(folder), "precision": "fp32", "device": "cpu"}
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(10)]

    run = gnomon.train(
        model="tiny", dataset=rows, rewards=[reward], steps=1, rollouts_per_step=16, max_completion_length=3,
        held_out={"size": 2, "fraction": 0.3}, precision="fp32",
    )  # fmt: skip

    assert set(run.evaluations[-1].scores) == {"model", "reward"}
    rollouts = run.rollouts(1)
    score = load_reward_model(settings(folder))
    expected = [score([Sample(each.question, each.rollout.text)])[0] for each in rollouts]
    assert [each.rollout.grade.reward for each in rollouts] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ModelError, match="has no head"):
        gnomon.train(model="tiny", dataset=rows, rewards=[{**reward, "model": str(save_tiny(tmp_path / "policy"))}])
