"""A separate value model: from the run's model or a folder, and back to a folder."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnomon.core.errors import ModelError
from gnomon.models.forward import body_of
from gnomon.models.load import TINY, load_model, merged_tensors, model_config, model_writer, read_tokenizer
from gnomon.models.tiny import tiny_model
from gnomon.models.token_strings import parsed, untrusted
from gnomon.models.values import ValueHead
from gnomon.models.weight_files import Read, Writer, folder_writer
from gnomon.models.weights_check import (
    Fit,
    check_number_kinds,
    check_numbers,
    check_quantized,
    headers,
    no_report,
    refuse,
)

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
    return _from_pretrained(folder, dtype, trusts_initial).to(device)


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
        older
    checkpoint, have it beside the backbone.
    """
    inner = folder / FOLDER
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

    from gnomon.models.load import load_tokenizer

    policy: Any = tiny_model(0) if name == TINY else None
    policy_config = model_config(name, trust_remote_code) if policy is None else policy.config
    mine, theirs = (c.get_text_config().vocab_size for c in (policy_config, config))
    if theirs < mine:
        raise ModelError(
            f"critic.initial: '{folder}' knows {theirs} tokens, the model '{name}' has {mine}; a critic reads the "
            "policy's token ids, so take one with the same tokenizer"
        )
    if not (folder / "tokenizer.json").is_file():
        return
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
