"""Choose the class of transformers that makes a config's model, causal language models that also read images too."""

from typing import Any

import torch

from gnomon.core.errors import ModelError
from gnomon.models.forward import body_of


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers that makes the model of a config.

    It is `AutoModelForCausalLM`, or `AutoModelForImageTextToText` where only that one makes the architecture that the
    config states: Qwen3.5, Llama 4 and Mistral Small 3 are published so. Such a model is trained on text, and its parts
    for images stay as they are.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    stated = config.architectures or ()
    # The language model alone is preferred: it needs no parts for images.
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if any(name in classes_of(auto, config) for name in stated):
            return auto
    return AutoModelForCausalLM


def made_by(auto: Any, *given: Any, **settings: Any) -> Any:
    """Return the model that a method of an auto class makes, its parts for images frozen: no text goes through them.

    So an optimizer holds nothing for them: in mixed precision their float32 masters took 4 bytes a weight.

    Args:
        auto: `from_config` or `from_pretrained` of what `auto_class` returns.
        *given: For it.
        **settings: For it.
    """
    made = auto(*given, **settings)
    # `from_pretrained` returns its report beside the model, if asked.
    model = made[0] if isinstance(made, tuple) else made
    if reads_images(model.config):
        language = {
            id(parameter)
            for part in (body_of(model), model.get_output_embeddings())
            if part is not None
            for parameter in part.parameters()
        }
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in language)
    return made


def reads_images(config: Any) -> bool:
    """Whether a config's model takes images beside text: either auto class may make it, as both do Gemma 3."""
    from transformers import AutoModelForImageTextToText

    made = classes_of(auto_class(config), config)
    return not set(made).isdisjoint(classes_of(AutoModelForImageTextToText, config))


def classes_of(auto: Any, config: Any) -> list[str]:
    """Return the names of the classes that an auto class makes of a config."""
    made = auto._model_mapping.get(type(config), ())
    return [kind.__name__ for kind in (made if isinstance(made, list | tuple) else [made]) if kind is not None]


def check_architecture(config: Any, name: str, trust_remote_code: bool) -> None:
    """Refuse a config that makes no causal language model, or another one than it states.

    Raises:
        ModelError: It does not; the message names model type and architectures.
    """
    stated = config.architectures or []
    remote = "AutoModelForCausalLM" in (vars(config).get("auto_map") or {})
    # Remote code defines its own classes, which no table of transformers lists.
    if remote and trust_remote_code:
        return
    made = classes_of(auto_class(config), config)
    # An encoder's config can make a causal model too, of weights that were never trained as one.
    if not made or config.is_encoder_decoder or (stated and not any(map(_writes_text, stated))):
        fix = "; it brings its own code, so set trust_remote_code = true if you trust it" if remote else ""
        raise ModelError(
            f"model '{name}' is not a causal language model that transformers knows "
            f"(model_type '{config.model_type}', architectures {stated}){fix}"
        )
    if stated and not any(architecture in made for architecture in stated):
        raise ModelError(
            f"model '{name}': config.json says model_type '{config.model_type}', which transformers loads as "
            f"{made[0]}, and architectures {stated}, which vLLM loads; correct the one that is wrong"
        )


def _writes_text(architecture: str) -> bool:
    """Whether transformers knows an architecture as one that writes text, whichever config it belongs to."""
    from transformers.models.auto import modeling_auto

    known = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    names = (name for mapping in known for name in mapping.values())
    return any(architecture in ((name,) if isinstance(name, str) else name) for name in names)


def empty_model(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the model of a config without weights.

    Raises:
        ModelError: If its embedding has no room for the pad token.
    """
    try:
        with torch.device("meta"):
            return made_by(auto_class(config).from_config, config, trust_remote_code=trust_remote_code)
    except AssertionError as error:
        if "adding_idx" not in str(error):
            raise
        text = config.get_text_config()
        raise ModelError(
            f"model '{config.name_or_path}': config.json says pad_token_id = {text.pad_token_id}, and the model has "
            f"the tokens 0 to {text.vocab_size - 1}; write one of them, or null"
        ) from error
