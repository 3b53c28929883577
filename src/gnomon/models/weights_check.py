"""Check that a model's files hold the weights of its config: names, shapes and dtypes from headers."""

import importlib.metadata
import importlib.util
import json
import logging
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gnomon.core.errors import ModelError, refusal_of, shortened
from gnomon.core.tensor_files import extremes
from gnomon.models.auto_class import empty_model
from gnomon.models.forward import Forward, ends_of
from gnomon.models.place import FILES
from gnomon.models.token_strings import first_line, parsed

# Keep transformers' own progress bars and reports off the terminal, where our progress line is.

_TOLD: set[str] = set()


def _is_new(record: logging.LogRecord) -> bool:
    """Whether a message is given for the first time; it is counted as given."""
    message = record.getMessage()
    is_new = message not in _TOLD
    _TOLD.add(message)
    return is_new


# It says the same of a config's rotary positions whenever the config is read or copied, at each checkpoint too.
logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_new)

_SILENT = 50  # logging.CRITICAL: nothing that transformers says of a loading is so urgent


@contextmanager
def no_bars() -> Iterator[None]:
    """Switch transformers' progress bars off inside the block."""
    from transformers.utils import logging as said

    was_on = said.is_progress_bar_enabled()
    said.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            said.enable_progress_bar()


@contextmanager
def no_report() -> Iterator[None]:
    """Suppress transformers' progress bars, warnings and tables during a load, because gnomon reports it."""
    from transformers.utils import logging as said

    level = said.get_verbosity()
    said.set_verbosity(_SILENT)
    try:
        with no_bars():
            yield
    finally:
        said.set_verbosity(level)


_SHOWN = 4
_FLOAT = "F32"
# Beyond these a config is taken for a mistake, unless the files hold as many tensors.
_MOST_LAYERS = 1000
_MOST_EXPERTS = 100_000
# Rows of a tensor that are compared where two of one name should be equal.
_PROBED_ROWS = 64
_LARGEST = 1e6
"""Of weights; those of published models are below a few thousand."""
_ROTARY = (
    "rope_theta", "rope_local_base_freq", "rotary_emb_base", "factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "low_freq_factor", "high_freq_factor", "attention_factor", "short_factor", "long_factor",
)  # fmt: skip
"""Settings of rotary positions; the first three may stand outside of a table."""
# Former names of rotary tables, which transformers translates.
_FORMER_KINDS = {"su": "longrope", "mrope": "default"}
_TRIED_TOKENS, _SEEN_AHEAD = 8, {torch.float32: 1e-3}
_DIRECTIONS = ("is_decoder", "is_causal", "causal", "use_bidirectional_attention", "attn_type")
"""Settings of a config that say whether attention sees what is behind a token."""
# What a file may hold besides the weights: buffers that were computed from the config.
_COMPUTED = re.compile(r"rotary_emb\.|inv_freq$|(attn|attention)\.(masked_)?bias$|position_ids$|num_batches_tracked$")
# What belongs to another use of the model, and is not trained here: it is said.
_ELSEWHERE = re.compile(r"(^|\.)(mtp|mtp_layers|nextn|v_head|value_head|score|reward_head)\.")
_WRAPPED = re.compile(r"^(base_model\.model\.|module\.|_orig_mod\.|_fsdp_wrapped_module\.|_forward_module\.)")
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|base_layer)(\.|$)")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_KINDS = _FLOATS | _INTEGERS | {"BOOL": torch.bool}


@dataclass(frozen=True)
class Header:
    """A tensor's entry in a file's header: shape, dtype ("BF16", "I8", as safetensors names them) and file."""

    shape: tuple[int, ...]
    kind: str
    file: Path


@dataclass(frozen=True)
class Fit:
    """How the names and shapes of a folder's tensors fit the model.

    Attributes:
        missing: In the model, in no file.
        mismatched: Name, shape in the files, shape in the model.
        unexpected: In the files, without a place in the model.
    """

    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    unexpected: tuple[str, ...]

    @classmethod
    def of(cls, loading: Mapping[str, Any]) -> "Fit":
        """Return the fit from transformers' own report of a load."""
        wrong = sorted((name, tuple(ours), tuple(theirs)) for name, ours, theirs in loading["mismatched_keys"])
        return cls(tuple(sorted(loading["missing_keys"])), tuple(wrong), tuple(sorted(loading["unexpected_keys"])))


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read; empty without weights.

    Raises:
        ModelError: If an index names no files or missing files, or if the folder holds two sets of weights or an
            adapter beside them.
    """
    places = [folder / name for name in FILES if (folder / name).is_file()]
    if places and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"'{folder}' holds a model and a LoRA adapter (adapter_config.json), and transformers would load both; "
            "merge them (peft: merge_and_unload) and give that folder, or remove the adapter's files"
        )
    # One file with all weights, safetensors before pickles, as transformers chooses.
    if not places or places[0].suffix != ".json":
        # vLLM would take the shards, and transformers the one file.
        if len(places) > 1 and places[1].name == FILES[1] and _shards(places[1]) != {FILES[0]}:
            raise ModelError(
                f"model folder '{folder}' holds weights twice, in {FILES[0]} and in the files that {FILES[1]} lists; "
                "remove those that are not the model"
            )
        return places[:1]
    shards = _shards(places[0])
    lost = sorted(shard for shard in shards if not (folder / shard).is_file())
    if lost:
        raise ModelError(f"model folder '{folder}' lacks weights that {places[0].name} lists: {_several(lost, 'file')}")
    return [folder / shard for shard in sorted(shards)]


def _shards(index: Path) -> set[str]:
    with parsed(f"'{index}' cannot be read, copy it again"):
        named = json.loads(index.read_text())["weight_map"].values()
    if not named or not all(isinstance(name, str) for name in named):
        raise ModelError(f"'{index}' names no file for its tensors (weight_map); copy it again")
    return set(named)


def headers(folder: Path) -> dict[str, Header]:
    """Return a model folder's tensors by name, from the headers of the files that transformers would read.

    Raises:
        ModelError: If a file is damaged, or two files hold different tensors of one name.
    """
    found: dict[str, Header] = {}
    for file in weight_files(folder):
        with parsed(f"'{file}' cannot be read as weights, copy it again"):
            try:
                held = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
            except pickle.UnpicklingError as error:
                raise ModelError(
                    f"'{file}' is damaged, or holds more than tensors, which could run code and is not read; copy it "
                    "again, or save the model as safetensors"
                ) from error
        for name in sorted(found.keys() & held.keys()):
            one, other = found[name], held[name]
            # Which of two files a loader takes last is its own affair, so both must say the same.
            if one.shape != other.shape or not _rows(name, one).equal(_rows(name, other)):
                raise ModelError(
                    f"model '{folder}' holds two different tensors {name}, in {one.file.name} and {file.name}; remove "
                    "the one that is not the model's"
                )
        found |= held
    return found


def check_rotary(stated: Mapping[str, Any], place: str) -> None:
    """Refuse a config.json with a setting of rotary positions that is not above zero, wherever it stands.

    Of some transformers makes NaN, of others positions that run backwards.

    Raises:
        ModelError: It names the setting and its value.
    """
    rest: list[tuple[bool, Mapping[str, Any]]] = [(False, stated)]
    while rest:
        is_table, part = rest.pop()
        for name, value in part.items():
            if isinstance(value, Mapping):
                # Some models have a table for each kind of layer within the table.
                rest.append((is_table or name in ("rope_parameters", "rope_scaling"), value))
            numbers = value if isinstance(value, list) else [value]
            if name in (_ROTARY if is_table else _ROTARY[:3]) and any(
                type(number) in (int, float) and number <= 0 for number in numbers
            ):
                raise ModelError(
                    f"model '{place}': config.json says {name} = {shortened(str(value))}, which makes no positions and "
                    "must be above 0; give the config.json that belongs to these weights"
                )


def check_positions(config: Any, stated: Mapping[str, Any], place: str) -> None:
    """Refuse a config whose settings of rotary positions are other numbers as transformers reads them.

    Args:
        stated: config.json itself. Phi-3's original length in rope_parameters alone becomes 4096, and a rope_theta
            beside a table that has one is passed over.

    Raises:
        ModelError: If they differ; it names the setting and both numbers.
    """
    check_rotary(stated, place)
    text = config.get_text_config()
    part = stated.get("text_config") or stated
    read = vars(text).get("rope_parameters") or {}
    # The same number may stand in three places, of which transformers reads one.
    for table in ("rope_parameters", "rope_scaling", ""):
        for name, value in ((part.get(table) or {}) if table else part).items():
            is_kind = bool(table) and name in ("type", "rope_type") and "rope_type" in read
            if is_kind and _FORMER_KINDS.get(value, value) != read["rope_type"]:
                raise ModelError(
                    f"model '{place}': config.json says {name} = {value!r} in {table}, and transformers reads "
                    f"rope_type = {read['rope_type']!r}; write one table, rope_parameters, with one rope_type"
                )
            if type(value) in (int, float) and name in read and read[name] != value:
                where = f"in {table}" if table else "by itself"
                raise ModelError(
                    f"model '{place}': config.json says {name} = {value} {where}, and "
                    f"transformers reads {read[name]}; write {name} in rope_parameters and beside it with the same "
                    "number"
                )


def check_plausible(config: Any, found: Mapping[str, Header], place: str) -> None:
    """Refuse a config with more layers or experts than the files can fill, before a model is built from it.

    Raises:
        ModelError: If the config is implausible.
    """
    # A config with a million layers would be built, without weights but with all modules, for hours.
    counts = [*_counts(config.to_dict())]
    if (layers := getattr(config.get_text_config(), "num_hidden_layers", None)) is not None:
        counts.append(("num_hidden_layers", layers))
    for name in ("sliding_window", "attention_chunk_size"):
        seen = vars(config.get_text_config()).get(name)
        if isinstance(seen, int) and seen < 1:
            raise ModelError(
                f"model '{place}': config.json says {name} = {seen}, within which a token sees nothing, not even "
                "itself; write null where all layers see everything"
            )
    for name, count in counts:
        most = _MOST_EXPERTS if "expert" in name else max(_MOST_LAYERS, len(found))
        is_layers = name in ("num_hidden_layers", "n_layer", "num_layers")
        if count < 0 or count > most or (is_layers and count == 0):
            raise ModelError(
                f"model '{place}': config.json says {name} = {count}, and the files hold {len(found)} tensors; give "
                "the config.json that belongs to these weights"
            )


def check_quantized(config: Any, place: str) -> None:
    """Refuse quantized weights, which cannot be trained. Raises ModelError."""
    for part in (config, config.get_text_config()):
        quantized = vars(part).get("quantization_config")
        if quantized:
            stated = quantized if isinstance(quantized, dict) else vars(quantized)
            raise ModelError(
                f"model '{place}' is quantized (config.json: quantization_config, quant_method = "
                f"'{stated.get('quant_method', 'unknown')}'), and quantized weights cannot be trained; give the model "
                "in bf16 or fp32, without quantization_config"
            )


def check_files(empty: Any, found: Mapping[str, Header], place: str) -> tuple[str, ...]:
    """Check that the files' tensors are those of the model ``empty``; return remarks.

    Raises:
        ModelError: Naming tensors that are missing, of another shape or dtype, tied only by the config, or unknown.
    """
    whole = frozenset(name for name, tensor in empty.state_dict().items() if not tensor.is_floating_point())
    check_number_kinds(found, whole, place)
    # Kinds first: a quantized tensor has another shape too, and its dtype is the better message.
    fit, lost = _fit(empty, found)
    if lost:
        raise ModelError(_missing(place, lost, found))
    refuse(fit, place, found)
    _check_ties(empty, found, place)
    _check_frequencies(empty, found, place)
    passed = [name for name in found if _is_passed_over(empty, name)] + list(fit.unexpected)
    told = sorted({name for name in passed if not _COMPUTED.search(name)})
    if not told:
        return ()
    return (
        f"'{place}' holds {_several(told)} besides the model that is trained; "
        f"{'it is' if len(told) == 1 else 'they are'} not loaded, and will be in no checkpoint",
    )


def check_form(empty: Any, folder: Path, trust_remote_code: bool) -> None:
    """Check that the config in ``folder`` gives the model ``empty`` again, and that its weights fit.

    Raises:
        ModelError: If they do not.
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    # Through files, as a loader of the checkpoint goes.
    again = empty_model(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), trust_remote_code)
    one, other = ({name: tuple(t.shape) for name, t in model.state_dict().items()} for model in (empty, again))
    if type(again).__name__ != type(empty).__name__ or one != other:
        wrong = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        raise ModelError(
            f"a {type(empty).__name__} becomes a {type(again).__name__} when its config is written and read, other in "
            f"{_several(wrong, 'weight')}"
        )
    spelled = revert_weight_conversion(empty, {name: tensor.to("meta") for name, tensor in empty.state_dict().items()})
    fit, lost = _fit(again, {n: Header(tuple(t.shape), _FLOAT, folder) for n, t in spelled.items()})
    if lost:
        raise ModelError(_missing("checkpoint", lost, ()))
    refuse(fit, "checkpoint")


def refuse(fit: Fit, place: str, names: Iterable[str] = ()) -> None:
    """Raise ModelError for missing, wrongly shaped or unknown weights; ``names`` are the files' tensors, if known."""
    held = list(names)
    # Missing weights would begin at random, which is worse than any other fault, so they are said first.
    if fit.missing:
        raise ModelError(_missing(place, fit.missing, held))
    if fit.mismatched:
        wrong = [
            f"{name} is {list(ours)} in the files and {list(theirs)} there" for name, ours, theirs in fit.mismatched
        ]
        raise ModelError(
            f"model '{place}' does not fit its config.json: {_several(wrong, 'weight')}; give the config.json that "
            "belongs to these weights"
        )
    extra = [name for name in fit.unexpected if not _COMPUTED.search(name) and not _ELSEWHERE.search(name)]
    if extra:
        what = "; merge the adapter into its base model (peft: merge_and_unload) and give that folder"
        is_adapter = any(_ADAPTER.search(name) for name in extra)
        raise ModelError(
            f"model '{place}' holds {_several(extra)} for which its config.json has no place, so the model would be "
            "another one without a word"
            f"{what if is_adapter else '; give the config.json that belongs to these weights, or remove them'}"
        )


def check_number_kinds(found: Mapping[str, Header], whole: Set[str], place: str) -> None:
    """Refuse integer, boolean or 8-bit float tensors for weights, but for those named ``whole``. Raises ModelError."""
    bad = [
        f"{name} ({header.kind})"
        for name, header in found.items()
        if header.kind not in _FLOATS and not _COMPUTED.search(name) and name not in whole
    ]
    if bad:
        raise ModelError(
            f"model '{place}' holds {_several(bad)} where weights are to be numbers in bf16, fp16 or fp32: they are "
            "quantized, or not weights at all; give the model in one of those"
        )


def check_numbers(model: nn.Module, place: str) -> None:
    """Refuse a model with NaN, infinity or numbers that no training gives, or with only zeros where it needs numbers.

    Zeros are checked in the embedding, the head, all matrices of a layer together, and all norms of a layer together.
    Raises ModelError.
    """
    largest: dict[str, float] = {}
    saved = model.state_dict().keys()
    buffers = [(n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point()]
    for name, parameter in (*model.named_parameters(), *buffers):
        low, high = extremes(parameter)
        # A single number that is not trained may be a bound: layers of Gemma 4 clamp by -inf and inf unless calibrated.
        is_bound = parameter.dim() == 0 and not isinstance(parameter, nn.Parameter)
        if not low <= high or (not is_bound and max(abs(low), abs(high)) == float("inf")):
            raise ModelError(f"model '{place}': the weight {name} holds NaN or an infinity; give a model without")
        if isinstance(parameter, nn.Parameter) and max(abs(low), abs(high)) > _LARGEST:
            raise ModelError(
                f"model '{place}': the weight {name} holds numbers up to {max(abs(low), abs(high)):.2g}, as no trained "
                "model does; it is damaged, or was read in another format: copy or convert it again"
            )
        if parameter.dim() > 1:
            largest[name] = max(abs(low), abs(high))
    # Gemma's norms multiply by 1 + weight, so a weight of zeros is an ordinary one there; a trial tells.
    norms = {f"{name}.weight": float(not _is_dead(part)) for name, part in model.named_modules() if _is_norm(part)}
    parts: dict[tuple[str, bool], list[str]] = {}
    ends = [getattr(end, "weight", None) for end in ends_of(model)]
    names_of_ends = {n for n, p in model.named_parameters() if any(p is e for e in ends)}
    for name in (*largest, *norms):
        # "model.layers.3." and the like: zeros are looked for in all matrices of a layer together, since some start at
        # zero.
        layer = re.match(r".*?\.\d+\.", name)
        group = name if name in names_of_ends else layer.group() if layer else ""
        parts.setdefault((group, name in norms), []).append(name)
    for names in parts.values():
        if not any(norms.get(name, largest.get(name)) for name in names):
            raise ModelError(
                f"model '{place}' has nothing but zeros in {_several(names)}; such a file was not written to its end, "
                "copy it again"
            )


@torch.no_grad()
def check_causal(model: nn.Module, place: str) -> None:
    """Refuse a model in which a token's logits depend on tokens behind it: answers are drawn before those are known.

    Two short rows that end in different tokens are compared; a model that runs elsewhere only is not looked at here.

    Raises:
        ModelError: If they do; it names the settings of config.json that make attention so.
    """
    network: Any = model
    # Two rows that differ in the last token alone.
    rows = torch.arange(1, _TRIED_TOKENS + 1).repeat(2, 1) % network.config.get_text_config().vocab_size
    rows[1, -1] = 0
    try:
        with torch.random.fork_rng(devices=[]):
            one, other = Forward(network)(rows, keep=0, use_cache=False).logits[:, :-1].float()
    except Exception as error:
        if refusal_of(error) is not None:
            raise
        return
    most = _SEEN_AHEAD.get(next(model.parameters()).dtype, 0.05)
    if float((one - other).abs().max()) > most * float((one - one.mean(-1, keepdim=True)).abs().max()):
        config = network.config.get_text_config()
        stated = [f"{n} = {getattr(config, n)!r}" for n in _DIRECTIONS if getattr(config, n, None) is not None]
        remedy = "correct that where these weights were trained from left to right"
        found = f"config.json: {', '.join(stated)}"
        if not stated:
            remedy = "take another version of transformers"
            found = f"nothing in config.json says so; transformers {importlib.metadata.version('transformers')}"
        raise ModelError(
            f"model '{place}': what {type(model).__name__} says of a token depends on tokens behind it, so it cannot "
            f"write text from left to right ({found}); give a causal model, or {remedy}"
        )


def _is_norm(part: nn.Module) -> bool:
    weight = getattr(part, "weight", None)
    return "norm" in type(part).__name__.lower() and isinstance(weight, nn.Parameter) and weight.dim() == 1


def _is_dead(norm: Any) -> bool:
    """Whether a norm gives zeros for everything: its weight is zero, and not added to one as in Gemma."""
    if not norm.weight.numel() or bool(norm.weight.any()):
        return False
    one_row = torch.linspace(-1.0, 1.0, norm.weight.numel(), dtype=norm.weight.dtype, device=norm.weight.device)
    try:
        with torch.no_grad():
            return not bool(norm(one_row.view(1, 1, -1)).any())
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False  # a norm that takes more than the row


def _fit(empty: Any, found: Mapping[str, Header]) -> tuple[Fit, tuple[str, ...]]:
    """Return transformers' fit of these names and shapes, or the missing names if it cannot fuse them.

    Without accelerate, which comes with the extra "lora", transformers compares nothing before a load.
    """
    if importlib.util.find_spec("accelerate") is None:
        return Fit((), (), ()), ()
    shapes = {n: torch.empty(h.shape, dtype=_KINDS.get(h.kind, torch.float32), device="meta") for n, h in found.items()}
    try:
        with no_report():
            # transformers' own loading with tensors that hold no numbers: renaming, fusing and ignoring are done by
            # its code.
            _, loading = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=shapes,
                device_map={"": "meta"},
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except RuntimeError as error:
        if refusal_of(error) is not None:  # no thread, no memory: the model is not to blame
            raise
        lost = _unfused(empty, found)
        if not lost:
            raise ModelError(f"the weights of '{empty.config.name_or_path}' do not fit: {first_line(error)}") from error
        return Fit((), (), ()), lost
    return Fit.of(loading), ()


def _unfused(empty: Any, found: Mapping[str, Header]) -> tuple[str, ...]:
    """Return the names of complete files that are missing or have another shape."""
    from transformers.core_model_loading import revert_weight_conversion

    whole: Mapping[str, Tensor] = revert_weight_conversion(empty, empty.state_dict())
    tied = set(empty.all_tied_weights_keys)
    lost = [n for n, t in whole.items() if n not in tied and (n not in found or found[n].shape != tuple(t.shape))]
    return tuple(sorted(lost))


def _missing(place: str, missing: Iterable[str], names: Iterable[str]) -> str:
    lost, given = list(missing), list(names)
    wrapped = next((found.group() for name in given if (found := _WRAPPED.match(name))), "")
    if any(_ADAPTER.search(name) for name in given):
        fix = "an adapter is not merged: peft's merge_and_unload() gives a model that is; give that folder"
    elif wrapped:
        fix = f"all names have '{wrapped}' in front: save the model inside of its wrapper, and give that folder"
    elif lost and all(name.startswith("lm_head") for name in lost):
        fix = "if the head is the embedding, set tie_word_embeddings = true in its config.json; else copy it again"
    else:
        fix = "copy the whole model again, or give the config.json that belongs to these weights"
    return f"model '{place}' lacks {_several(lost, 'weight')}, which would begin at random; {fix}"


def _check_ties(empty: Any, found: Mapping[str, Header], place: str) -> None:
    """Refuse a head that the config ties and the files store separately. A sample of rows is compared."""
    for target, source in empty.all_tied_weights_keys.items():
        one, other = _named(target, found), _named(source, found)
        if one is None or other is None or _rows(one, found[one]).equal(_rows(other, found[other])):
            continue
        raise ModelError(contradiction(place, one, other))


def _check_frequencies(empty: Any, found: Mapping[str, Header], place: str) -> None:
    """Refuse rotary frequencies in the files that are not theta ** (-i / length) of the config's ``rope_theta``."""
    table = vars(empty.config.get_text_config()).get("rope_parameters") or {}
    stored = next((name for name in found if name.endswith("rotary_emb.inv_freq")), None)
    if stored is None or table.get("rope_type") != "default" or type(table.get("rope_theta")) not in (int, float):
        return
    held = _rows(stored, found[stored]).double()
    # Frequency i of n is theta ** (-i / n), so theta is frequency 1 to the power of -n.
    theta = float(held[1]) ** -float(held.numel()) if held.dim() == 1 and held.numel() > 1 and 0 < held[1] < 1 else 0.0
    if theta and not 0.5 < theta / table["rope_theta"] < 2.0:
        raise ModelError(
            f"model '{place}' holds {stored} of rope_theta = {theta:.6g}, and its config.json gives "
            f"{table['rope_theta']:g}; write the right one there (transformers reads no frequencies from files)"
        )


def contradiction(place: str, one: str, other: str) -> str:
    """Describe two weights that the config ties and the files store separately."""
    return (
        f"model '{place}': config.json ties {one} to {other} (tie_word_embeddings = true), and the files hold two "
        "different ones; set tie_word_embeddings = false in config.json, or remove the one that is wrong"
    )


def _named(name: str, found: Mapping[str, Header]) -> str | None:
    """Return a weight's name in the files, whose prefix may differ."""
    if name in found:
        return name
    last = ".".join(name.split(".")[-2:])
    close = [n for n in found if n == last or n.endswith(f".{last}")]
    return close[0] if len(close) == 1 else None


def _rows(name: str, header: Header) -> Tensor:
    count = header.shape[0] if header.shape else 1
    step = max(1, count // _PROBED_ROWS)
    if header.file.suffix == ".safetensors":
        with safe_open(header.file, framework="pt") as opened:
            part = opened.get_slice(name)
            return torch.cat([part[row : row + 1] for row in range(0, count, step)]) if header.shape else part[:]
    tensor: Tensor = torch.load(header.file, map_location="cpu", mmap=True, weights_only=True)[name]
    return tensor[::step]


def _is_passed_over(empty: Any, name: str) -> bool:
    """Whether transformers ignores a tensor of this name silently."""
    return any(re.search(pattern, name) for pattern in empty._keys_to_ignore_on_load_unexpected or ())


def _safetensors(file: Path) -> dict[str, Header]:
    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: Header(tuple(part.get_shape()), str(part.get_dtype()), file) for n, part in parts.items()}
    except SafetensorError as error:
        raise ModelError(f"'{file}' is damaged: {error}; copy it again") from error


def _pickled(file: Path) -> dict[str, Header]:
    kinds = {kind: name for name, kind in _KINDS.items()}
    # On the meta device no number is read; weights_only refuses pickles that could run code.
    state = torch.load(file, map_location="meta", weights_only=True)
    others = [str(name) for name, held in state.items() if not isinstance(held, Tensor)]
    if others:
        raise ModelError(
            f"'{file}' holds {_several(others, 'thing')} besides tensors, as a trainer's own checkpoint does; save "
            "the model with save_pretrained and give that folder"
        )
    return {n: Header(tuple(t.shape), kinds.get(t.dtype, str(t.dtype)), file) for n, t in state.items()}


def _counts(node: Any) -> Iterator[tuple[str, int]]:
    """Yield the config's settings that count layers or experts."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif (
            type(value) is int
            and re.search(r"(^|_)(layers?|depth|experts)$", name)
            and re.match(r"(n|num)_|depth", name)
        ):
            yield name, value


def _several(names: Iterable[str], what: str = "tensor") -> str:
    """Return the number of names and the first of them.

    >>> _several(["a", "b", "c", "d", "e"])
    '5 tensors (a, b, c, d and 1 more)'
    """
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{len(listed)} {what}{'' if len(listed) == 1 else 's'} ({', '.join(listed[:_SHOWN])}{more})"
