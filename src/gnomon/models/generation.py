"""A model's generation config, so that what transformers reads is also what it writes."""

import copy
import re
from typing import Any

_NAMED = re.compile(r"`(\w+)`")
_LISTED = re.compile(r"^- `(\w+)`:", re.MULTILINE)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def savable(generation_config: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a generation config that transformers agrees to write, and the fields that were left out for it.

    transformers reads a temperature beside do_sample = false, and refuses to save it. The fields that it names are left
    out; token ids stay, of which generation needs the ends.
    """
    kept, dropped = copy.deepcopy(generation_config), list[str]()
    while (said := _refusal(kept)) is not None:
        named = [
            name for name in _LISTED.findall(said) or _NAMED.findall(said) if getattr(kept, name, None) is not None
        ]
        # A number of answers needs do_sample, which is not at fault where both are named.
        wrong = [name for name in named if name != "do_sample"] or named
        if not wrong:
            ids = {name: value for name in _IDS if (value := getattr(kept, name, None)) is not None}
            return type(kept)(**ids), tuple(sorted(vars(kept).keys() - ids.keys()))
        for name in wrong:
            dropped.append(name)
            if hasattr(type(kept)(), name):
                setattr(kept, name, None)
            else:
                delattr(kept, name)
    return kept, tuple(dropped)


def moved(config: Any, generation_config: Any) -> None:
    """Take out of a model's config what belongs to a generation config, which transformers would not write there.

    A field that the generation config leaves open is set there.
    """
    for name, value in config._get_generation_parameters().items():
        delattr(config, name)
        if getattr(generation_config, name, None) is None:
            setattr(generation_config, name, value)


def _refusal(generation_config: Any) -> str | None:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        generation_config.validate(strict=True)
    except (ValueError, TypeError) as error:
        return str(error)
    finally:
        logging.set_verbosity(level)
    return None
