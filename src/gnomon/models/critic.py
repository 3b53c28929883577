"""Values and scores: a value head on the policy, a sequence classifier, and a separate value model with its folder."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnomon.core.errors import ConfigError, ModelError
from gnomon.models.backbone import Backbone
from gnomon.models.device import placed
from gnomon.models.forward import body_of
from gnomon.models.load import (
    config_of,
    load_model,
    load_tokenizer,
    local_folder,
    model_config,
    model_writer,
    place_of,
    read_tokenizer,
)
from gnomon.models.lora import merged_tensors
from gnomon.models.place import BUILT_IN
from gnomon.models.tiny import TINY_MODELS, tiny_model
from gnomon.models.token_strings import parsed, untrusted
from gnomon.models.tokenizer import Tokenizer
from gnomon.models.weight_files import Read, Writer, folder_writer
from gnomon.models.weights_check import (
    Fit,
    check_files,
    check_number_kinds,
    check_numbers,
    check_quantized,
    headers,
    no_report,
    refuse,
    weight_files,
)

# Values of the states before each token of the responses, from a padded micro-batch.


class ValueHead(nn.Linear):
    """A linear map from a hidden state to a number: V = w h, float32, without bias, initially zero.

    Args:
        width: Of the hidden states.

    >>> ValueHead(4)(torch.ones(1, 4)).item()
    0.0
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.weight)


@dataclass(frozen=True)
class Values:
    """A critic's values.

    Attributes:
        values: Float32[B T], of the state *before* each unmasked token, exact zeros elsewhere.
        bootstrap: Float32[B], of the state after a sequence's last token; 0 for a row without unmasked tokens.
        computed: Positions that went through the backbone, padding included.
    """

    values: Tensor
    bootstrap: Tensor
    computed: int


class ValueScorer:
    """Reads a value at the hidden state that predicts a token, before the token is chosen.

    This is position p - 1 for the token at p, the same shift as for log-probabilities. A value read at p would know the
    token, and the advantage would then compare the token with itself. Rows with one prompt share its computation if the
    backbone allows it (`prefix`).

    Args:
        backbone: A causal model of transformers in eval mode, whose own head is unused.
        head: Hidden state to one number, applied in float32 for every precision of the backbone.
    """

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        self.backbone: Any = backbone
        self.head = head
        self._body = Backbone(backbone)
        self.shares_prompts = self._body.can_share()

    def __call__(
        self, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor, mask: Tensor, is_head_only: bool = False
    ) -> Values:
        """Return the values of the response tokens where ``mask`` is true, with a gradient if torch records one.

        Args:
            tokens: Int[B S], padded right with any valid id.
            prompt_lengths: Int[B], >= 1.
            lengths: Int[B], where responses end.
            mask: Bool[B T]; column t is the token at position prompt_length + t.
            is_head_only: End the gradient at the head.

        Raises:
            ConfigError: If a prompt is empty, since there is no state before its first response token.
        """
        rows, columns = mask.nonzero(as_tuple=True)
        live = mask.any(1).nonzero()[:, 0]
        before = prompt_lengths[rows] + columns - 1
        if rows.numel() == 0:
            nothing = torch.zeros(mask.shape, device=mask.device)
            return Values(nothing, nothing.sum(1), 0)
        if int(before.min()) < 0:
            raise ConfigError("a prompt has no token, so there is no state before its first response token")
        # States before each token, and behind them the last state of each row: its value is the bootstrap.
        wanted = (torch.cat([rows, live]), torch.cat([before, lengths[live] - 1]))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_head_only):
            hidden, index = self._hidden(tokens, prompt_lengths, lengths, wanted)
        # (wanted states, d), in float32 as the head is.
        states = hidden.flatten(0, 1).index_select(0, index).float()
        found = nn.functional.linear(states, self.head.weight, self.head.bias)[:, 0]
        of_tokens, of_ends = found.split([len(rows), len(live)])
        return Values(
            # Scattered back into (B, T); what is not asked for stays an exact zero.
            values=torch.zeros(mask.shape, device=mask.device).index_put((rows, columns), of_tokens),
            bootstrap=torch.zeros(len(mask), device=mask.device).index_put((live,), of_ends),
            computed=hidden.shape[0] * hidden.shape[1],
        )

    def is_row_packed(self, longest: int) -> bool:
        """Whether rows of at most ``longest`` tokens that share prompts are computed one behind another."""
        return self._body.is_row_packed(longest)

    def shares_beginnings(self) -> bool:
        """Whether what all prompts of such a row begin with is computed once."""
        return self._body.shares_beginnings()

    def _hidden(
        self, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor, wanted: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states Float[N L d], and where in their flattened rows each wanted one is."""
        packed = self._body.pack(tokens, prompt_lengths, lengths) if self.shares_prompts else None
        if packed is None:
            hidden, (rows, positions) = self._body.plain(tokens), wanted
            return hidden, rows * hidden.shape[1] + positions
        return self._body.packed(packed, tokens.device), packed.index(*wanted)


# A sequence classifier, or a language model with a value head, that gives token sequences their logits.

Encoded = Mapping[str, Sequence[int]]
"""The inputs of one sequence by transformers' names: ``input_ids``, for some encoders ``token_type_ids``."""


@dataclass(frozen=True)
class ClassifierFiles:
    """A classifier's config and tokenizer, read without a weight.

    Attributes:
        labels: The names of its outputs; one of a value head.
        is_value_head: Whether the outputs are those of a value head that gnomon saved.
    """

    name: str
    config: Any
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    is_value_head: bool


@dataclass(frozen=True)
class Classifier:
    """A loaded classifier on its device, in eval mode."""

    files: ClassifierFiles
    network: Any
    device: torch.device

    @torch.inference_mode()
    def logits(self, rows: Sequence[Encoded], batch_size: int) -> Tensor:
        """Return Float32[rows, labels] on the CPU; sequences of like length share a forward pass.

        A config without a padding token makes transformers read the last token of a single sequence and refuse
        several. A token that none of them has is the padding then, so that the last token is read in each.
        """
        # Ties keep the order of the rows, so that batches and their rounding are the same each time.
        order = sorted(range(len(rows)), key=lambda row: (len(rows[row]["input_ids"]), row))
        found = torch.empty(len(rows), len(self.files.labels))
        for start in range(0, len(rows), batch_size):
            chosen = order[start : start + batch_size]
            found[chosen] = self._forward([rows[row] for row in chosen]).float().cpu()
        return found

    def _forward(self, rows: Sequence[Encoded]) -> Tensor:
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        lengths = torch.tensor([len(row) for row in tokens], device=self.device)
        text = self.network.config.get_text_config()
        is_stated = text.pad_token_id is not None
        used = set(torch.cat(tokens).tolist())
        pad = text.pad_token_id if is_stated else next(i for i in range(len(used) + 1) if i not in used)
        padded = {"input_ids": nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=pad)}
        if "token_type_ids" in rows[0]:
            kinds = [torch.tensor(row["token_type_ids"]) for row in rows]
            padded["token_type_ids"] = nn.utils.rnn.pad_sequence(kinds, batch_first=True)
        inputs = {name: tensor.to(self.device) for name, tensor in padded.items()}
        mask = (torch.arange(inputs["input_ids"].shape[1], device=self.device) < lengths[:, None]).long()
        if isinstance(self.network, CausalCritic):
            # gnomon's own form has no `forward`: its head is read at the last token here.
            hidden = self.network.get_decoder()(attention_mask=mask, use_cache=False, **inputs).last_hidden_state
            last = hidden[torch.arange(len(rows), device=self.device), lengths - 1]
            values: Tensor = self.network.score(last.float())
            return values
        # transformers finds a row's last token by the padding's id in the config, not by the mask.
        text.pad_token_id = pad
        try:
            logits: Tensor = self.network(attention_mask=mask, **inputs).logits
        finally:
            if not is_stated:
                text.pad_token_id = None
        return logits


def read_classifier(name: str) -> ClassifierFiles:
    """Return what a classifier's config and tokenizer say, after checking its files without reading a weight.

    Args:
        name: A folder in the Hugging Face layout, or a hub name ("org/name").

    Raises:
        ModelError: If it is missing, has no head, lacks weights, is quantized, or has no tokenizer.
    """
    if name in BUILT_IN:
        raise ModelError(f"reward model '{name}' is a language model without a head; give a sequence classifier")
    config, folder = config_of(name), local_folder(name)
    tokenizer = read_tokenizer(place_of(name))
    if folder is not None and head_file(folder) is not None:
        return ClassifierFiles(name, config, tokenizer, ("value",), True)
    stated = config.architectures or []
    if not any(architecture.endswith("ForSequenceClassification") for architecture in stated):
        raise ModelError(
            f"reward model '{name}' has no head, so its scores would come from new weights: its config.json says "
            f"architectures {stated}; give a sequence classifier (...ForSequenceClassification), or a folder that "
            'gnomon saved with a value head; a language model that judges in words is a reward of kind = "judge"'
        )
    check_quantized(config, name)
    empty = _empty(config, name)
    if folder is not None and weight_files(folder):
        check_files(empty, headers(folder), name)
    # RoBERTa and its like count positions from the padding token's id on.
    places = [m for n, m in empty.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    most = [m.num_embeddings - m.padding_idx - 1 for m in places if m.padding_idx is not None]
    if most and (tokenizer.context_length is None or most[0] < tokenizer.context_length):
        tokenizer = replace(tokenizer, context_length=most[0])
    labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    return ClassifierFiles(name, config, tokenizer, labels, False)


def load_classifier(files: ClassifierFiles, dtype: torch.dtype, device: torch.device) -> Classifier:
    """Return the classifier with its weights in ``dtype``, on ``device``.

    Raises:
        ModelError: If weights are missing, which would begin at random, do not fit the config, or are no numbers.
    """
    if files.is_value_head:
        folder = place_of(files.name)
        return Classifier(files, load_critic(folder, folder, dtype, device=device), device)
    from transformers import AutoModelForSequenceClassification

    with parsed(f"reward model '{files.name}' cannot be loaded"), no_report():
        network, loading = AutoModelForSequenceClassification.from_pretrained(
            place_of(files.name), dtype=dtype, output_loading_info=True
        )
    refuse(Fit.of(loading), files.name)
    check_numbers(network, files.name)
    return Classifier(files, placed(network.eval(), device), device)


def _empty(config: Any, name: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"), parsed(f"reward model '{name}': its config.json makes no sequence classifier"):
        return AutoModelForSequenceClassification.from_config(config)


FOLDER, HEAD_FILE = "critic", "value_head.safetensors"
POLICY = "policy"


class CausalCritic(nn.Module):
    """A causal language model with a value head, for architectures without a sequence classification form.

    The model's own head is kept frozen, so that the written folder can be loaded again.

    Args:
        model: A causal language model of transformers.
        score: See `ValueHead`.
    """

    def __init__(self, model: Any, score: ValueHead) -> None:
        super().__init__()
        self.model = model
        self.score = score
        # A tied head is the embedding, which is trained.
        own = model.get_output_embeddings()
        if own is not None and own.weight is not model.get_input_embeddings().weight:
            own.requires_grad_(False)

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    def get_decoder(self) -> nn.Module:
        """Return the backbone, under transformers' name for it."""
        decoder: nn.Module = body_of(self.model)
        return decoder

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings, under transformers' name for them."""
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings


def check_critic(name: str, initial: str, trust_remote_code: bool = False, trusts_initial: bool = False) -> None:
    """Check that ``initial`` can be the critic of the model ``name``, without reading a weight.

    Args:
        name: The run's model.
        initial: "policy", or a folder.
        trust_remote_code: Allow the code of ``name`` to run.
        trusts_initial: Allow the code of ``initial`` to run.

    Raises:
        ModelError: If ``initial`` is neither "policy" nor a folder with a value model: one label, the run's vocabulary.
    """
    if initial == POLICY:
        return
    folder = _folder(initial)
    config = _config(folder, trusts_initial)
    if head_file(folder) is None:
        _check_classifier(config, folder)
    _check_files(folder)
    check_quantized(config, str(folder))
    _check_vocabulary(name, config, folder, trust_remote_code, trusts_initial)


def load_critic(
    name: str,
    initial: str,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    trusts_initial: bool = False,
) -> nn.Module:
    """Return a separate value model on ``device`` in eval mode; ``critic.score`` is its head.

    The result is transformers' sequence classification form of the architecture, if there is one. Its linear head is
    read at every position (`ValueScorer`), not only at the last one.

    Args:
        name: The run's model.
        initial: "policy", the model ``name`` with a head of zeros; or a folder with a saved critic, a reward model
            (sequence classification with one label), or a policy that was saved with its value head.
        dtype: Of the backbone; the head is float32.
        trust_remote_code: As in `check_critic`.
        device: Where the critic computes.
        trusts_initial: As in `check_critic`.

    Raises:
        ModelError: As `check_critic` does, or if the weights do not fit the config.
    """
    check_critic(name, initial, trust_remote_code, trusts_initial)
    if initial == POLICY:
        policy = load_model(name, dtype, trust_remote_code=trust_remote_code)
        return (_classifier(policy) or CausalCritic(policy, head_for(policy))).eval().to(device)
    folder = _folder(initial)
    head = head_file(folder)
    if head is not None:
        model = load_model(str(folder), dtype, trust_remote_code=trusts_initial)
        return CausalCritic(model, _read_head(head, _width(model))).eval().to(device)
    return placed(_from_pretrained(folder, dtype, trusts_initial), device)


def head_for(policy: nn.Module, model: str | None = None) -> ValueHead:
    """Return a head for a critic that shares the backbone of ``policy``, on its device.

    Args:
        model: The folder of a model that may have a head; one of zeros where it has none.
    """
    file = None if model is None else head_file(Path(model).expanduser())
    head = ValueHead(_width(policy)) if file is None else _read_head(file, _width(policy))
    return head.to(next(policy.parameters()).device)


def write_critic(critic: nn.Module, folder: Path) -> None:
    """Write a value model as a Hugging Face folder that `load_critic` and transformers can load.

    A `ValueHead`, whose backbone is the policy's, becomes one file.
    """
    critic_writer(critic)(folder)


def write_reward_model(checkpoint: Path, folder: Path, trust_remote_code: bool = False) -> None:
    """Write a checkpoint that has a head as transformers' sequence classifier with one label, and its tokenizer.

    An architecture without such a form becomes a language model with its head beside it (`load_critic`). The classifier
    reads the last token that is no padding: where the chat template ends with the padding token, another is named.

    Raises:
        ModelError: The checkpoint has no head, or cannot be loaded.
    """
    tokenizer = read_tokenizer(str(checkpoint), trust_remote_code)
    dtype = model_config(str(checkpoint), trust_remote_code).dtype or torch.float32
    critic: Any = load_critic(str(checkpoint), str(checkpoint), dtype, trust_remote_code, "cpu", trust_remote_code)
    network: Any = _classifier(critic.model)
    if network is not None:
        network.score = critic.score
        text, backend = network.config.get_text_config(), tokenizer.backend
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        # A classifier reads the last token that is no padding; it must not skip the end of the chat template.
        ends = tokenizer.encode(tokenizer.template(chat, begins_answer=False) or "")[-1:]
        free = [name for name, number in tokenizer.control.items() if number not in (*ends, *tokenizer.stop_ids)]
        if (backend.pad_token_id is None or backend.pad_token_id in ends) and free:
            backend.pad_token = free[0]
        text.pad_token_id = backend.pad_token_id
    write_critic(critic if network is None else network, folder)
    tokenizer.save(folder)


def critic_writer(critic: nn.Module, forms: Mapping[str, Tensor] | None = None, read: Read | None = None) -> Writer:
    """Return a function that writes a value model, from any thread; see `folder_writer`.

    Args:
        critic: The value model.
        forms, read: Of its weights; None are those it has now, copied to the CPU. A head alone is always copied.
    """
    if isinstance(critic, ValueHead):
        weight = _copied(critic.weight)
        return lambda folder: _write_head(weight, folder)
    given = forms or {name: _copied(tensor) for name, tensor in merged_tensors(critic)}
    if not isinstance(critic, CausalCritic):
        return folder_writer(critic, given, read)
    # A CausalCritic holds the language model as `model`; in a folder its weights have their own names.
    start = "model."
    own = {name.removeprefix(start): form for name, form in given.items() if name.startswith(start)}

    def backbone(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        assert read is not None, "else the forms are read"
        pairs = read([f"{start}{name}" for name in names])
        return ((pair[0].removeprefix(start), pair[1]) for pair in pairs)

    write_model = model_writer(own, critic.config, critic.model.generation_config, None if read is None else backbone)
    head = dict(read(["score.weight"]))["score.weight"] if read is not None else given["score.weight"]

    def write_both(folder: Path | None) -> Mapping[Path, str]:
        return {**write_model(folder), **_write_head(head, folder)}

    return write_both


def _write_head(weight: Tensor, folder: Path | None) -> Mapping[Path, str]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"score.weight": weight}, folder / HEAD_FILE)
    return {}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _folder(initial: str) -> Path:
    folder = Path(initial).expanduser()
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(
            f"critic.initial: the folder '{initial}' {what} (looked in {folder.absolute()}); give 'policy', or the "
            f"folder of a critic that a run has saved or of a reward model{_hint(folder)}"
        )
    return folder


def head_file(folder: Path) -> Path | None:
    """Return the value head's file for the model in ``folder``, or None.

    A checkpoint has it in "critic", beside the config of a separate critic if there is one. A critic's folder, and an
    older checkpoint, have it beside the backbone.
    """
    inner = folder / FOLDER
    # A config in "critic" makes that a model of its own, whose head is not this model's.
    places = [folder / HEAD_FILE] if (inner / "config.json").is_file() else [inner / HEAD_FILE, folder / HEAD_FILE]
    return next((place for place in places if place.is_file()), None)


def _hint(folder: Path) -> str:
    """Return where a run or one of its checkpoints has a critic."""
    checkpoints = [folder, *folder.glob("checkpoints/step-*")]
    separate = [checkpoint / FOLDER for checkpoint in checkpoints if (checkpoint / FOLDER / "config.json").is_file()]
    shared = [checkpoint for checkpoint in (*checkpoints, folder.parent) if head_file(checkpoint) is not None]
    newest = max(separate + shared, key=lambda place: place.stat().st_mtime, default=None)
    return "" if newest is None else f". There is one in {newest}"


def _config(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    said = f"critic.initial: transformers cannot read '{folder / 'config.json'}'"
    with untrusted(f"the critic '{folder}'", "algorithm.critic.trust_remote_code"), parsed(said):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _check_files(folder: Path) -> None:
    """Refuse truncated or empty weight files, by their headers alone."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                continue
        except (OSError, SafetensorError) as error:
            raise ModelError(f"critic.initial: '{file}' is damaged: {error}; copy it again") from error
    check_number_kinds(headers(folder), frozenset(), str(folder))


def _check_classifier(config: Any, folder: Path) -> None:
    stated = config.architectures or []
    if not any(architecture.endswith("ForSequenceClassification") for architecture in stated):
        raise ModelError(
            f"critic.initial: '{folder}' is no value model but {stated}; give a critic that a run has saved, a reward "
            "model (sequence classification with one label), or 'policy', which begins with a head of zeros"
            f"{_hint(folder)}"
        )
    if config.num_labels != 1:
        raise ModelError(f"critic.initial: '{folder}' has {config.num_labels} labels; a value is one number: one label")


def _check_vocabulary(name: str, config: Any, folder: Path, trust_remote_code: bool, trusts_initial: bool) -> None:
    """Refuse a critic without rows for some token ids, or with a tokenizer that gives ids another meaning."""
    from transformers import AutoTokenizer

    shape = TINY_MODELS.get(name)
    policy: Any = None if shape is None else tiny_model(0, shape)
    policy_config = model_config(name, trust_remote_code) if policy is None else policy.config
    mine, theirs = (c.get_text_config().vocab_size for c in (policy_config, config))
    if theirs < mine:
        raise ModelError(
            f"critic.initial: '{folder}' knows {theirs} tokens, the model '{name}' has {mine}; a critic reads the "
            "policy's token ids, so take one with the same tokenizer"
        )
    if not (folder / "tokenizer.json").is_file():
        return
    # Equal sizes are not enough: every token must have the same id in both.
    with parsed(f"critic.initial: transformers cannot read the tokenizer in '{folder}'"):
        known = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_initial).get_vocab()
    for token, number in load_tokenizer(name, trust_remote_code).backend.get_vocab().items():
        if known.get(token) != number:
            raise ModelError(
                f"critic.initial: '{folder}' has another vocabulary than the model '{name}': token {token!r} is "
                f"{known.get(token, 'missing')} there and {number} here; take a critic with the same tokenizer"
            )


def _classifier(policy: Any) -> nn.Module | None:
    """Return the architecture's classifier around the policy's backbone, or None if there is no such form."""
    from transformers import AutoModelForSequenceClassification

    if type(policy.config) not in AutoModelForSequenceClassification._model_mapping:
        return None
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    with torch.device("meta"):
        network: Any = AutoModelForSequenceClassification.from_config(config)
    # Some architectures' classifiers have another backbone, or a head of several layers, which has no value at each
    # token.
    if type(network.base_model) is not type(policy.base_model) or not _has_head(network):
        return None
    setattr(network, network.base_model_prefix, policy.base_model)
    network.score = ValueHead(network.score.in_features)
    found: nn.Module = network
    return found


def _from_pretrained(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    with parsed(f"critic.initial: '{folder}' cannot be loaded"), no_report():
        network, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    refuse(Fit.of(loading), str(folder))
    check_numbers(network, str(folder))
    if not _has_head(network):
        raise ModelError(
            f"critic.initial: '{folder}' ({type(network).__name__}) has no linear head 'score' with one output, so its "
            "value cannot be read at every token; take a reward model on a causal trunk"
        )
    # Float32 as `ValueHead`, whatever precision the backbone has.
    network.score.float()
    loaded: nn.Module = network.eval()
    return loaded


def _has_head(network: nn.Module) -> bool:
    head = dict(network.named_children()).get("score")
    return isinstance(head, nn.Linear) and head.out_features == 1


def _read_head(path: Path, width: int) -> ValueHead:
    head = ValueHead(width)
    with parsed(f"critic.initial: the value head '{path}' cannot be read"):
        weight: Tensor = load_file(path)["score.weight"]
    if weight.shape != head.weight.shape:
        raise ModelError(
            f"critic.initial: the value head in '{path.parent}' reads {weight.numel()} numbers, its trunk has {width}"
        )
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def _width(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)
