"""A sequence classifier, or a language model with a value head, that gives token sequences their logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import ModelError
from gnomon.models.critic import CausalCritic, head_file, load_critic
from gnomon.models.load import BUILT_IN, config_of, local_folder, read_tokenizer
from gnomon.models.token_strings import parsed
from gnomon.models.tokenizer import Tokenizer
from gnomon.models.weights_check import (
    Fit,
    check_files,
    check_numbers,
    check_quantized,
    headers,
    no_report,
    refuse,
    weight_files,
)

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
            hidden = self.network.get_decoder()(attention_mask=mask, use_cache=False, **inputs).last_hidden_state
            last = hidden[torch.arange(len(rows), device=self.device), lengths - 1]
            values: Tensor = self.network.score(last.float())
            return values
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
    tokenizer = read_tokenizer(_place(name))
    if folder is not None and head_file(folder) is not None:
        return ClassifierFiles(name, config, tokenizer, ("value",), True)
    stated = config.architectures or []
    if not any(architecture.endswith("ForSequenceClassification") for architecture in stated):
        raise ModelError(
            f"reward model '{name}' has no head, so its scores would come from new weights: its config.json says "
            f"architectures {stated}; give a sequence classifier (...ForSequenceClassification), or a folder that "
            "gnomon saved with a value head"
        )
    check_quantized(config, name)
    if folder is not None and weight_files(folder):
        check_files(_empty(config, name), headers(folder), name)
    labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    return ClassifierFiles(name, config, tokenizer, labels, False)


def load_classifier(files: ClassifierFiles, dtype: torch.dtype, device: torch.device) -> Classifier:
    """Return the classifier with its weights in ``dtype``, on ``device``.

    Raises:
        ModelError: If weights are missing, which would begin at random, do not fit the config, or are no numbers.
    """
    if files.is_value_head:
        folder = _place(files.name)
        return Classifier(files, load_critic(folder, folder, dtype, device=device), device)
    from transformers import AutoModelForSequenceClassification

    with parsed(f"reward model '{files.name}' cannot be loaded"), no_report():
        network, loading = AutoModelForSequenceClassification.from_pretrained(
            _place(files.name), dtype=dtype, output_loading_info=True
        )
    refuse(Fit.of(loading), files.name)
    check_numbers(network, files.name)
    return Classifier(files, network.eval().to(device), device)


def _place(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def _empty(config: Any, name: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"), parsed(f"reward model '{name}': its config.json makes no sequence classifier"):
        return AutoModelForSequenceClassification.from_config(config)
