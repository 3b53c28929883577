"""A model as a Hugging Face folder, written tensor by tensor: no two weights need be in memory at once."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.core.tensor_files import write_in_order
from gnomon.models.weights_check import no_bars

Read = Callable[[Sequence[str]], Iterable[tuple[str, Tensor]]]
"""Yields the weights of the names that it is given, in their order."""
Writer = Callable[[Path | None], Mapping[Path, str]]
"""Writes into a folder and returns the XXH3 of each file of weights; without a folder it only reads what is read."""
FILE_BYTES = 50_000_000_000
"""Most bytes of a file of weights, as transformers has it."""
_INDEX, _PATTERN = "model.safetensors.index.json", "model{suffix}.safetensors"


def folder_writer(
    network: Any, forms: Mapping[str, Tensor], read: Read | None = None, file_bytes: int = FILE_BYTES
) -> Writer:
    """Return what writes a network's config and weights as `save_pretrained` does, in any thread.

    The header of a file comes first, so forms are known before a weight is read. A weight that has several names in
    files (experts, which are stacked in memory) is read as one and written as many.

    Args:
        network: A model of transformers. Its own weights are not looked at.
        forms: Shape and type of each weight by its name in memory, maybe on the meta device.
        read: Returns the weights; every process reads, in the same order. None: they are ``forms``.
        file_bytes: Most bytes of a file.
    """

    def own(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, forms[name]) for name in names)

    groups = _groups(network, {n: _empty(t) for n, t in forms.items()})
    names = [name for group, _ in groups for name in group]

    def write(folder: Path | None) -> dict[Path, str]:
        tensors = iter((read or own)(names))
        try:
            return {} if folder is None else _write(network, groups, tensors, folder, file_bytes)
        finally:
            # Where processes read together, the others go on until the last.
            for _ in tensors if read is not None else ():
                pass

    return write


_Groups = Sequence[tuple[Sequence[str], Mapping[str, Tensor]]]


def _write(
    network: Any, groups: _Groups, tensors: Iterator[tuple[str, Tensor]], folder: Path, file_bytes: int
) -> dict[Path, str]:
    with no_bars():
        # Config, generation config and code, by transformers' own function; the weights are written below.
        network.save_pretrained(folder, state_dict={})
    forms = {name: form for _, targets in groups for name, form in targets.items()}
    files = _files(forms, file_bytes)
    spelled = _spelled(network, groups, tensors)
    hashes = {}
    for file, own in files.items():
        path = folder / file
        path.unlink(missing_ok=True)
        # The hash is made while the file is written, so it costs no second reading.
        hashes[path] = write_in_order(path, own, spelled, {"format": "pt"})
    if len(files) > 1:
        sizes = {
            "total_parameters": sum(f.numel() for f in forms.values()),
            "total_size": sum(f.nbytes for f in forms.values()),
        }
        index = {"metadata": sizes, "weight_map": {name: file for file, own in files.items() for name in own}}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return hashes


def _files(forms: Mapping[str, Tensor], file_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Return what each file has, in order: as much as it may, and one tensor at least."""
    parts, size = list[dict[str, Tensor]]([{}]), 0
    for name, form in forms.items():
        if parts[-1] and size + form.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = form
        size += form.nbytes
    suffixes = [f"-{i:05d}-of-{len(parts):05d}" for i in range(1, len(parts) + 1)] if len(parts) > 1 else [""]
    return {_PATTERN.format(suffix=suffix): part for suffix, part in zip(suffixes, parts, strict=True)}


def _spelled(network: Any, groups: _Groups, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for names, targets in groups:
        found = spell(network, dict(islice(tensors, len(names))))
        yield from ((name, found.pop(name)) for name in targets)


def spell(network: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names that files have, with experts apart; what keeps its form is not copied."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(network, dict(tensors))
    return found


def _groups(network: Any, forms: Mapping[str, Tensor]) -> _Groups:
    """Return which names become which, a group for each weight that is spelled by itself, else for its layer.

    The widest numbers come first, so that each lies in its file at a multiple of its size.
    """
    ignored = [name for name in network._keys_to_ignore_on_save or () if name in forms]
    forms = {name: form for name, form in forms.items() if name not in ignored}
    whole = spell(network, forms)
    # Layers are alike, so one name of each kind is tried instead of all of them.
    alike: dict[str, list[str]] = defaultdict(list)
    for name in forms:
        alike[re.sub(r"\d+", "#", name)].append(name)
    groups: dict[str, list[str]] = defaultdict(list)
    for names in alike.values():
        is_alone = _is_alone(network, names[0], forms[names[0]], whole)
        for name in names:
            groups[name if is_alone else _layer(name)].append(name)
    found = []
    for names in groups.values():
        spelled = spell(network, {name: forms[name] for name in names})
        found.append((names, {name: _empty(tensor) for name, tensor in spelled.items()}))
    return sorted(found, key=lambda group: -max(form.dtype.itemsize for form in group[1].values()))


def _is_alone(network: Any, name: str, form: Tensor, whole: Mapping[str, Tensor]) -> bool:
    try:
        # A weight that is spelled by itself need not wait for its layer: only one is in memory.
        alone = spell(network, {name: form})
    except (RuntimeError, ValueError, LookupError, TypeError):
        return False
    return all(n in whole and whole[n].shape == t.shape for n, t in alone.items())


def _layer(name: str) -> str:
    return re.split(r"(?<=\d)\.", name, maxsplit=1)[0]


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
